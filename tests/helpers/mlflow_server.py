"""A real MLflow server on loopback: it keeps runs, and takes traces from any OpenTelemetry exporter."""

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from vlmflow.core.own_environment import python_of
from vlmflow.core.process import bound_to_this_process

START = 120.0
"""Seconds in which a server must answer: it imports for some, and makes its tables."""


class MlflowServer:
    """A server of a folder, whose database stays when it is killed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def database(self) -> Path:
        return self.folder / "mlflow.db"

    def start(self) -> None:
        """Start it on its port, and wait until it answers."""
        words = ["server", "--backend-store-uri", f"sqlite:///{self.database}", "--workers", "1"]
        words += ["--default-artifact-root", str(self.folder / "artifacts")]
        words += ["--host", "127.0.0.1", "--port", str(self.port)]
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [str(python_of("track")), "-m", "mlflow", *words],
                env=os.environ | {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=bound_to_this_process(signal.SIGTERM),
            )
        give_up = time.monotonic() + START
        while True:
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=5).close()  # noqa: S310 (ours)
                return
            except (urllib.error.URLError, OSError):
                assert self._process.poll() is None, (self.folder / "server.log").read_text()
                assert time.monotonic() < give_up, (self.folder / "server.log").read_text()
                time.sleep(0.1)

    def kill(self) -> None:
        """Kill it with all its processes, in the middle of whatever they do."""
        if self._process and self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def ask(self, path: str, question: Any = None) -> Any:
        """Return the answer of MLflow's REST API to a question; without one, to a GET."""
        body = None if question is None else json.dumps(question).encode()
        request = urllib.request.Request(f"{self.url}/api/{path}", body, {"Content-Type": "application/json"})  # noqa: S310
        with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310
            return json.load(answer)


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
