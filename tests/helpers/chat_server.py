"""A small OpenAI-compatible server whose behaviour is known, for tests of what asks one."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

Behaviour = Callable[[str, list[dict[str, Any]]], str | int | bytes]
"""Takes the model's name and the messages; returns the answer, the status of an error, or a whole reply."""


class ChatServer(ThreadingHTTPServer):
    """requests: the bodies of all requests, in order. keys: their Authorization headers. form: the replies' type."""

    form = "application/json"

    def __init__(self, behave: Behaviour) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.behave = behave
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class _Handler(BaseHTTPRequestHandler):
    server: ChatServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else each answer waits 40 ms

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(body)
        self.server.keys.append(self.headers["Authorization"])
        said = self.server.behave(body["model"], body["messages"])
        if isinstance(said, bytes):
            return self._send(200, said)
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": said}}
        reply = {"id": "1", "object": "chat.completion", "created": 0, "model": body["model"], "choices": [choice]}
        content = json.dumps(reply if isinstance(said, str) else {"error": {"message": "no, \x1b[2J"}}).encode()
        self._send(200 if isinstance(said, str) else said, content)

    def _send(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", self.server.form)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *words: Any) -> None:
        """Print nothing."""


@contextmanager
def chat_server(behave: Behaviour) -> Iterator[ChatServer]:
    """Run a server as long as the block runs."""
    with ChatServer(behave) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def last_text(messages: list[dict[str, Any]]) -> str:
    """Return the text of the last message."""
    content = messages[-1]["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


@contextmanager
def canned_server(reply: bytes) -> Iterator[str]:
    """Run a server that gives one reply to everything; yield its address."""
    with chat_server(lambda model, messages: reply) as server:
        yield server.url
