"""A collector that takes all traces and keeps none, or refuses some of each request, as OTLP allows."""

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any


class TraceSink(ThreadingHTTPServer):
    """refuses: how many spans of each request it refuses. bytes: of all requests."""

    def __init__(self, refuses: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.refuses = refuses
        self.bytes = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: TraceSink

    def do_POST(self) -> None:
        self.server.bytes += len(self.rfile.read(int(self.headers["Content-Length"])))
        # ExportTraceServiceResponse {partial_success {rejected_spans: refuses, error_message: "too old"}}
        refusal = b"\x0a\x0b\x08" + bytes([self.server.refuses]) + b"\x12\x07too old"
        content = refusal if self.server.refuses else b""
        self.send_response(200 if self.path == "/v1/traces" else 404)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *words: Any) -> None:
        """Print nothing."""


@contextmanager
def trace_sink(refuses: int = 0) -> Iterator[TraceSink]:
    """Run a collector as long as the block runs."""
    with TraceSink(refuses) as sink:
        thread = Thread(target=sink.serve_forever)
        thread.start()
        try:
            yield sink
        finally:
            sink.shutdown()
            thread.join()
