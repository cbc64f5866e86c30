"""A collector that takes all traces and keeps none, or refuses some of each request, as OTLP allows."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from typing import Any, NamedTuple

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
        super().__init__(("127.0.0.1", 0), _Handler)
        self.reply = reply
        self.ends = Event()
        self.bytes = 0
        self.keys: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
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
