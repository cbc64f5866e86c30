"""Keeps a server from filling this process's memory: its answers are read uncompressed, and up to some megabytes."""

from collections.abc import Iterator

import httpx

from vlmflow.core.errors import VlmflowError

MOST_BYTES = 8_000_000
"""Of an answer, by default."""


def limit_answers(client: httpx.Client, most: int = MOST_BYTES) -> httpx.Client:
    """Return a client that asks for no compression, and reads at most so many bytes of an answer.

    It then raises VlmflowError with the address, as soon as an answer is compressed all the same, or longer.
    """
    client.headers["Accept-Encoding"] = "identity"

    def limit(answer: httpx.Response) -> None:
        place = f"{answer.url.scheme}://{answer.url.netloc.decode()}{answer.url.path}"
        encoding = answer.headers.get("content-encoding", "identity").strip().lower()
        if encoding != "identity":
            raise VlmflowError(f"{place}: its answer is compressed, though we asked for none that is", OTHER)
        assert isinstance(answer.stream, httpx.SyncByteStream)  # for mypy: the client is no asynchronous one
        answer.stream = _Limited(answer.stream, place, most)

    hooks = client.event_hooks
    client.event_hooks = hooks | {"response": [*hooks.get("response", []), limit]}
    return client


OTHER = "see that this is the address of the server that you mean, and not of another program"


class _Limited(httpx.SyncByteStream):
    """An answer's bytes up to a limit. place: its address, for the message."""

    def __init__(self, stream: httpx.SyncByteStream, place: str, most: int) -> None:
        self._stream = stream
        self._place = place
        self._most = most

    def __iter__(self) -> Iterator[bytes]:
        left = self._most
        for block in self._stream:
            left -= len(block)
            if left < 0:
                raise VlmflowError(f"{self._place}: its answer has more than {self._most:,} bytes", OTHER)
            yield block

    def close(self) -> None:
        self._stream.close()
