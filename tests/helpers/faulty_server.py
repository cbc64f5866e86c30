"""Local HTTP servers that break off, refuse or give wrong answers on demand."""

import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self

BLOCK = 64 * 1024


@dataclass(frozen=True)
class Answer:
    """What the server is about to send; a fault replaces it."""

    status: int
    headers: dict[str, str]
    body: bytes = b""
    whole: bytes = b""
    """The whole file; the body may be a range of it."""
    stop_after: int | None = None
    """After this many bytes of the body, the answer ends as `end` says."""
    end: str = "close"


Fault = Callable[[Answer], Answer]


def breaks(after: int, end: str = "close") -> Fault:
    """End the answer after `after` bytes. end: close, reset, or stall (silence until the client leaves)."""
    return lambda answer: replace(answer, stop_after=after, end=end)


def refuses(status: int, **headers: str) -> Fault:
    return lambda answer: Answer(
        status, {name.replace("_", "-"): text for name, text in headers.items()}, b'{"error": "no"}'
    )


def html_page() -> Fault:
    return lambda answer: Answer(200, {"Content-Type": "text/html; charset=utf-8"}, b"<html>Sign in</html>")


def ignores_range() -> Fault:
    return lambda answer: replace(answer, status=200, headers={"ETag": answer.headers["ETag"]}, body=answer.whole)


def with_headers(**headers: str) -> Fault:
    changed = {name.replace("_", "-"): text for name, text in headers.items()}
    return lambda answer: replace(answer, headers={**answer.headers, **changed})


class FaultyServer:
    """Serves on a free loopback port until its `with` block ends.

    pace: seconds between two blocks of 64 KiB.
    """

    def __init__(self) -> None:
        self.pace = 0.0
        self.lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), self.handler())
        self._server.daemon_threads = True
        self._server.handle_error = lambda *_: None  # the client left
        self.port = self._server.server_address[1]

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def handler(self) -> type[BaseHTTPRequestHandler]:
        """Return the class that answers requests."""
        raise NotImplementedError


class _Server(ThreadingHTTPServer):
    request_queue_size = 64  # a client that finds the queue full retries after a second


class FaultyHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_: object) -> None:
        pass

    def send(self, answer: Answer, pace: float, sent: Callable[[int], object]) -> None:
        """Send an answer in blocks, and break it off as it says. sent: called with the size of every block."""
        self.send_response(answer.status)
        for name, text in {"Content-Length": str(len(answer.body)), **answer.headers}.items():
            self.send_header(name, text)
        self.end_headers()
        if self.command == "HEAD":
            return
        rest = memoryview(answer.body)[: answer.stop_after]
        try:
            while rest:
                sent(len(rest[:BLOCK]))
                self.wfile.write(rest[:BLOCK])
                rest = rest[BLOCK:]
                time.sleep(pace)
            if answer.stop_after is not None:
                self._end(answer.end)
        except OSError:
            self.close_connection = True

    def _end(self, how: str) -> None:
        self.close_connection = True
        if how == "stall":
            self.connection.settimeout(20)
            self.connection.recv(1)
        if how == "reset":
            # Closing with a linger time of 0 sends RST instead of FIN.
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            os.close(self.connection.detach())
