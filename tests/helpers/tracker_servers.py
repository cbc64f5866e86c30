"""Servers on loopback for trackers: a real MLflow, a real Phoenix, and a collector that may refuse."""

import json
import os
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any, NamedTuple

from debian import lacking
from vlmflow.core.child_programs import python_of
from vlmflow.serving.server import PortTakenError, Server, free_port, running
from workflow_runs import ROOT

START = 300.0
"""Seconds in which a server must answer: it imports for some, and makes its tables."""

ANSWER = 300.0
"""Seconds in which it must answer a request."""


class MlflowServer:
    """A server of a folder, whose database stays when it is killed. url: its address since its last start."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = ""
        self._running = ExitStack()
        self._server: Server | None = None

    @property
    def database(self) -> Path:
        return self.folder / "mlflow.db"

    def start(self) -> None:
        """Start it on a free port, and wait until it answers."""
        for last in (False, False, True):
            port = free_port()
            words = [str(python_of("track")), "-m", "mlflow", "server", "--workers", "1"]
            words += ["--backend-store-uri", f"sqlite:///{self.database}"]
            words += ["--default-artifact-root", str(self.folder / "artifacts")]
            words += ["--host", "127.0.0.1", "--port", str(port)]
            quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
            log, env = self.folder / "server.log", os.environ | quiet
            block = running(words, "MLflow", port, self.folder, log, env, START, at_our_death=signal.SIGTERM)
            try:
                self._server = self._running.enter_context(block)
            except PortTakenError:  # somebody took the port between our look and the server's
                if last:
                    raise
            else:
                self.url = f"http://127.0.0.1:{port}"
                return

    def kill(self) -> None:
        """Kill it with all its processes, in the middle of whatever they do."""
        if self._server:
            with suppress(ProcessLookupError):
                os.killpg(self._server.process.pid, signal.SIGKILL)
            self._server = None
        self._running.close()

    def ask(self, path: str, question: Any = None) -> Any:
        """Return the answer of MLflow's REST API to a question; without one, to a GET."""
        body = None if question is None else json.dumps(question).encode()
        request = urllib.request.Request(f"{self.url}/api/{path}", body, {"Content-Type": "application/json"})  # noqa: S310
        with urllib.request.urlopen(request, timeout=ANSWER) as answer:  # noqa: S310
            return json.load(answer)


class FatalProxy(ThreadingHTTPServer):
    """Passes requests on to a server, which it kills after the nth one to a path; nobody gets the answer to that one.

    faults: what went wrong besides. reached: whether the server was killed.
    """

    daemon_threads = False  # so that the block's end waits for requests

    def __init__(self, server: MlflowServer, path: str, number: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.server, self.path, self.number = server, path, number
        self.counted = 0
        self.reached = False
        self.faults: list[Exception] = []
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: FatalProxy

    def do_POST(self) -> None:
        try:
            answered = self._ask()
        except OSError as error:
            if not self.server.reached:
                self.server.faults.append(error)
            self.close_connection = True  # without an answer, as a dead server's
        else:
            with suppress(OSError):  # the sender may not wait for it
                self._answer(*answered)

    do_GET = do_POST

    def _ask(self) -> tuple[int, str, bytes]:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)) or None
        url = self.server.server.url + self.path
        request = urllib.request.Request(url, body, dict(self.headers), method=self.command)  # noqa: S310 (ours)
        try:
            answer = urllib.request.urlopen(request, timeout=ANSWER)  # noqa: S310
        except urllib.error.HTTPError as refusal:
            answer = refusal
        with answer:
            answered = answer.status, answer.headers.get("Content-Type", ""), answer.read()
        if self.path.endswith(self.server.path):
            self._count()
        return answered

    def _count(self) -> None:
        with self.server.lock:
            self.server.counted += 1
            if self.server.counted == self.server.number:
                self.server.reached = True
                self.server.server.kill()
            if self.server.reached:
                raise ConnectionAbortedError("the server is dead")

    def _answer(self, status: int, kind: str, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *words: Any) -> None:
        """Print nothing."""


@contextmanager
def fatal_proxy(server: MlflowServer, path: str, number: int) -> Iterator[FatalProxy]:
    """Stand before a server as long as the block runs; it must have been killed by then."""
    with FatalProxy(server, path, number) as proxy:
        thread = threading.Thread(target=proxy.serve_forever)
        thread.start()
        try:
            yield proxy
        finally:
            proxy.shutdown()
            thread.join()
    assert proxy.faults == []
    assert proxy.reached, f"{proxy.counted} requests to {path}, not {number}"


@contextmanager
def mlflow_server(folder: Path) -> Iterator[MlflowServer]:
    """Run a server as long as the block runs."""
    folder.mkdir(parents=True, exist_ok=True)
    server = MlflowServer(folder)
    server.start()
    try:
        yield server
    finally:
        server.kill()


RUN = [str(ROOT / ".venv/bin/uv"), "tool", "run", "--from", "arize-phoenix==20.26.1", "phoenix"]

FOUND = """query ($project: ID!, $condition: String!) { node(id: $project) { ... on Project {
  spans(first: 1000, filterCondition: $condition) { edges { node { name } } } } } }"""

PHOENIX_START = 600.0
"""Seconds in which it must answer: it imports for some, and makes its tables."""


class Phoenix:
    """A server. url: its address, also for traces."""

    def __init__(self, url: str) -> None:
        self.url = url

    def ask(self, path: str) -> Any:
        """Return the answer of its REST API to a GET."""
        with urllib.request.urlopen(f"{self.url}/v1/{path}", timeout=60) as answer:  # noqa: S310
            return json.load(answer)

    def spans(self, project: str, count: int) -> list[dict[str, Any]]:
        """Return the spans of a project, once it has so many: Phoenix answers before it has stored them."""
        give_up = time.monotonic() + 60
        while True:
            known = {one["name"] for one in self.ask("projects")["data"]}
            found = self.ask(f"projects/{project}/spans?limit=1000")["data"] if project in known else []
            if len(found) >= count:
                return list(found)
            assert time.monotonic() < give_up, f"{len(found)} of {count} spans"
            time.sleep(0.5)

    def filtered(self, project: str, condition: str) -> list[str]:
        """Return the sorted names of a project's spans that its filter finds, as people write it into the page."""
        (number,) = [one["id"] for one in self.ask("projects")["data"] if one["name"] == project]
        question = {"query": FOUND, "variables": {"project": number, "condition": condition}}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}/graphql", json.dumps(question).encode(), headers)  # noqa: S310
        with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
            found = json.load(answer)
        return sorted(edge["node"]["name"] for edge in found["data"]["node"]["spans"]["edges"])


@contextmanager
def phoenix_server(folder: Path) -> Iterator[Phoenix]:
    """Run a server whose database is in a folder, until the block ends.

    If it cannot be fetched the test is skipped; under CI it fails.
    """
    if subprocess.run([*RUN, "--help"], capture_output=True, check=False).returncode:
        reason = "arize-phoenix is neither in uv's cache nor can it be fetched"
        lacking(reason)
    port = free_port()
    own = {"PHOENIX_WORKING_DIR": str(folder), "PHOENIX_HOST": "127.0.0.1", "PHOENIX_PORT": str(port)}
    own |= {"PHOENIX_GRPC_PORT": str(free_port()), "PHOENIX_TELEMETRY_ENABLED": "false"}
    place = ("Phoenix", port, folder, folder / "server.log", os.environ | own, PHOENIX_START)
    with running([*RUN, "serve"], *place, at_our_death=signal.SIGTERM):
        yield Phoenix(f"http://127.0.0.1:{port}")


PROTOBUF = "application/x-protobuf"


class Reply(NamedTuple):
    """What a collector answers to requests.

    kind: the content type; none if it is empty. place: of a redirect. path: how the paths end that get it; others get
    404. reason: beside the status. pause: seconds between endless repetitions of the content; None: it is sent once.
    """

    content: bytes = b""
    kind: str = PROTOBUF
    status: int = 200
    place: str = ""
    path: str = "/v1/traces"
    reason: str | None = None
    pause: float | None = None


TAKES_ALL = Reply()

# ExportTraceServiceResponse {partial_success {rejected_spans: 2, error_message: "too old"}}
REFUSES_TWO = Reply(b"\x0a\x0b\x08\x02\x12\x07too old")


class TraceSink(ThreadingHTTPServer):
    """reply: to each request for traces. bytes: of all requests. keys: their headers Authorization."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(("127.0.0.1", 0), _SinkHandler)
        self.reply = reply
        self.ends = Event()
        self.bytes = 0
        self.keys: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _SinkHandler(BaseHTTPRequestHandler):
    server: TraceSink

    def do_POST(self) -> None:
        self.server.bytes += len(self.rfile.read(int(self.headers.get("Content-Length") or 0)))
        self.server.keys.append(self.headers["Authorization"])
        reply = self.server.reply
        self.send_response(reply.status if self.path.endswith(reply.path) else 404, reply.reason)
        for name, value in (("Content-Type", reply.kind), ("Location", reply.place)):
            if value:
                self.send_header(name, value)
        if reply.pause is None:
            self.send_header("Content-Length", str(len(reply.content)))
        self.end_headers()
        with suppress(OSError):  # whoever reads an answer without end goes away
            self.wfile.write(reply.content)
            while reply.pause is not None and not self.server.ends.wait(reply.pause):
                self.wfile.write(reply.content)

    do_GET = do_POST

    def log_message(self, *words: Any) -> None:
        """Print nothing."""


@contextmanager
def trace_sink(reply: Reply = TAKES_ALL) -> Iterator[TraceSink]:
    """Run a collector as long as the block runs."""
    with TraceSink(reply) as sink:
        thread = Thread(target=sink.serve_forever)
        thread.start()
        try:
            yield sink
        finally:
            sink.ends.set()
            sink.shutdown()
            thread.join()
