"""No server fills our memory: not with a long answer, nor with one that grows when it is unpacked."""

import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import httpx
import pytest
from huggingface_hub import constants
from huggingface_hub.utils import get_session

from vlmflow.core.errors import VlmflowError
from vlmflow.fetch import hub
from vlmflow.fetch.transport import limit_answers

asked: list[str | None] = []


@contextmanager
def server(content: bytes, encoding: str = "", length: bool = True, status: int = 200) -> Iterator[str]:
    """Run a server that gives one answer to everything; yield its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.headers["Accept-Encoding"])
            self.send_response(status)
            if encoding:
                self.send_header("Content-Encoding", encoding)
            if length:
                self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *words: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = Thread(target=running.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{running.server_port}"
        finally:
            running.shutdown()
            thread.join()


@pytest.fixture
def client() -> Iterator[httpx.Client]:
    asked.clear()
    with limit_answers(httpx.Client(trust_env=False), 1000) as made:
        yield made


@pytest.mark.parametrize("encoding", ["", "identity", "Identity"])
def test_a_short_answer_is_read_as_it_is(client: httpx.Client, encoding: str) -> None:
    for length in (True, False):
        with server(b"x" * 1000, encoding, length) as address:
            assert client.get(address).content == b"x" * 1000
    assert asked == ["identity"] * 2


@pytest.mark.parametrize("status", [200, 500])
@pytest.mark.parametrize("length", [True, False])
def test_a_longer_answer_is_not_read_to_its_end(client: httpx.Client, length: bool, status: int) -> None:
    with (
        server(b"x" * 1001, length=length, status=status) as address,
        pytest.raises(VlmflowError, match=r"/a: its answer has more than 1,000 bytes") as caught,
    ):
        client.get(f"{address}/a?key=secret")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "gzip, identity", "other"])
def test_a_compressed_answer_is_not_unpacked(client: httpx.Client, encoding: str) -> None:
    content = gzip.compress(bytes(1000))
    with server(content, encoding) as address, pytest.raises(VlmflowError, match="its answer is compressed"):
        client.get(address)


def test_the_client_of_the_hub_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # a package that another test imports may have set it
    assert hub.LONGEST_ANSWER < 1_000_000_000
    for content, encoding, says in ((gzip.compress(bytes(9)), "gzip", "compressed"), (b"{}", "", None)):
        with server(content, encoding) as address:
            if says is None:
                assert get_session().get(address).json() == {}
            else:
                with pytest.raises(VlmflowError, match=says):
                    get_session().get(address)


def test_other_hooks_stay(client: httpx.Client) -> None:
    seen: list[int] = []
    with (
        httpx.Client(
            trust_env=False, event_hooks={"response": [lambda answer: seen.append(answer.status_code)]}
        ) as own,
        server(b"x" * 1001) as address,
        pytest.raises(VlmflowError),
    ):
        limit_answers(own, 1000).get(address)
    assert seen == [200]
