"""A real MLflow server on loopback: it keeps runs, and takes traces from any OpenTelemetry exporter."""

import json
import os
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from vlmflow.core.child_programs import python_of
from vlmflow.serving.server import PortTakenError, Server, free_port, running

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
