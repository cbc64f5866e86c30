"""A Kubernetes API server that fails on demand, and a client of it."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml


class BadMinutes(ThreadingHTTPServer):
    """Answers with `answers` in order (a status, or None to hang up), then with an empty list."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.answers: list[tuple[int | None, dict | bytes, dict]] = []
        self.asked: list[str] = []
        self.ahead = 0.0


class Answer(BaseHTTPRequestHandler):
    def answer(self) -> None:
        self.server.asked.append(f"{self.command} {self.path}")
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        status, body, headers = self.server.answers.pop(0) if self.server.answers else (200, {"items": []}, {})
        if status is None:
            self.connection.close()
            return
        text = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(text)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text)

    def date_time_string(self, timestamp: float | None = None) -> str:
        return super().date_time_string(time.time() + self.server.ahead)

    do_GET = do_POST = do_DELETE = answer

    def log_message(self, *args: object) -> None:
        """Log nothing."""


@contextmanager
def serving() -> Iterator[BadMinutes]:
    """Serve on a free loopback port until the `with` block ends."""
    with BadMinutes() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@contextmanager
def serving_by_default(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[BadMinutes]:
    """Serve as the cluster that a client finds by default, and make the client retry at once."""
    with serving() as server:
        kubeconfig = kubeconfig_of(f"http://127.0.0.1:{server.server_address[1]}", folder / "kubeconfig")
        patch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(kubeconfig))
        patch.setattr("vlmflow.remote.cluster.api.FIRST_PAUSE", 0.02)
        yield server


def kubeconfig_of(address: str, file: Path) -> Path:
    """Write a kubeconfig for an address, and return its path."""
    kubeconfig = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": address}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    file.write_text(yaml.safe_dump(kubeconfig))
    return file


def refusal(code: int, reason: str, message: str = "") -> tuple[int, dict, dict]:
    return code, {"kind": "Status", "reason": reason, "message": message or f"said {reason}"}, {}
