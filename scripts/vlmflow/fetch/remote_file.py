"""One file on an HTTP server, read in ranges by several threads over an unreliable network."""

import re
from collections.abc import Callable

from vlmflow.core.errors import PassingError, VlmflowError
from vlmflow.core.patience import PassingFault
from vlmflow.fetch import hub
from vlmflow.fetch.transport import Accept, Answer, Enough, Refused, Sink, Transport, host_of


class RemoteFile:
    """A file on a server.

    name: its name for people, without secrets.
    find: returns its address, which may be valid only for a while; may raise PassingFault.
    size: bytes; None until `open` if unknown.
    version: names the content: a commit, or the server's ETag or date, which `open` reads.
    takes_ranges: whether the server sends parts of it.
    """

    def __init__(
        self, name: str, find: Callable[[], str], transport: Transport, size: int | None = None, version: str = ""
    ) -> None:
        self.name = name
        self.size = size
        self.version = version
        self.takes_ranges = True
        self._find = find
        self._transport = transport
        self._address: str | None = None
        self._headers: dict[str, str] = {}
        self._mark = ""
        self._opened = False

    @property
    def length(self) -> int:
        """The size in bytes; known after `open`."""
        assert self.size is not None, f"{self.name} is not open"
        return self.size

    def open(self) -> None:
        """Ask the server for size and version, and whether it supports ranges.

        Raises Refused if the server refuses the file, VlmflowError if it fails too often.
        """

        def learn(answer: Answer) -> None:
            self._learn(answer)
            if not self.takes_ranges:
                raise Enough

        def attempt() -> None:
            received = 0

            def count(block: bytes) -> None:
                nonlocal received
                received += len(block)
                if received > 1:  # more than was asked for, perhaps without end
                    raise Enough

            self._ask({"range": "bytes=0-0"}, learn, count)

        if not self._opened:
            self._transport.patiently(self.name, attempt)
            self._opened = True

    def _learn(self, answer: Answer) -> None:
        self.takes_ranges = answer.status == 206
        header, begins = ("content-range", "bytes 0-0/") if self.takes_ranges else ("content-length", "")
        found = re.fullmatch(rf"{begins}([0-9]{{1,19}})", answer.headers.get(header, ""))
        if found is None:
            raise Refused("refused", f"{answer.host} does not report its size")
        size = int(found[1])
        if self.size not in (None, size):
            raise VlmflowError(
                f"{self.name}: {answer.host} has {size:,} bytes under this name, {self.size:,} are expected",
                "find out why before you use it; the configuration (picture_sources), picture_sources.yaml or "
                "pins.yaml sets its size",
            )
        self.size = size
        self._mark = _mark_of(answer)
        self.version = self.version or self._mark

    def read(self, start: int, end: int) -> bytes:
        """Return the bytes from `start` up to `end` (exclusive); after a break only the missing ones are requested.

        Raises VlmflowError if the file changed meanwhile or the server fails too often; Stopped.
        """
        blocks: list[bytes] = []
        self.stream(start, end, blocks.append, blocks.clear)
        return b"".join(blocks)

    def stream(self, start: int, end: int, sink: Sink, restart: Callable[[], object]) -> None:
        """Pass the bytes from `start` up to `end` (exclusive) to `sink`, block by block.

        restart: drops what `sink` has got, if a server without ranges sends the file from the start again.
        Raises as `read` does.
        """
        place = start

        def take(block: bytes) -> None:
            nonlocal place
            wanted = block[: end - place]
            if not wanted:
                raise Enough
            sink(wanted)
            place += len(wanted)

        def attempt() -> None:
            nonlocal place
            if not self.takes_ranges and place:
                restart()
                place = 0
            headers = {"range": f"bytes={place}-{end - 1}"} if self.takes_ranges else {}
            if self._mark.startswith('"'):  # If-Range needs a strong ETag (RFC 9110, 13.1.5)
                headers["if-range"] = self._mark
            first = place
            self._ask(headers, lambda answer: self._accept(answer, first, end), take)
            if place < end:
                raise PassingFault(f"{host_of(self._address or '')} ended {end - place:,} bytes early")

        self._transport.patiently(self.name, attempt, lambda: place - start)

    def _ask(self, headers: dict[str, str], accept: Accept, sink: Sink) -> None:
        """Ask for the file. Raises PassingFault, or Refused for a refusal before the first successful answer."""
        address, own_headers = self._address, self._headers
        if address is None:
            address = self._find()
            own_headers = hub.headers_for(address)

        def accept_file(answer: Answer) -> None:
            if self._address != answer.address:  # from now on ask directly where the redirects ended
                self._headers = hub.headers_for(answer.address)
                self._address = answer.address
            self._refuse_what_is_no_file(answer)
            accept(answer)

        self._transport.get(address, {**own_headers, **headers}, accept_file, sink)

    def _refuse_what_is_no_file(self, answer: Answer) -> None:
        problem = answer.problem(200, 206)
        if problem:
            self._address = None  # a signed address may have expired
            raise answer.fault(problem) if answer.may_pass or self._opened else Refused("refused", problem)

    def _accept(self, answer: Answer, start: int, end: int) -> None:
        mark = _mark_of(answer)
        if self._mark and mark and mark != self._mark:
            raise PassingError(
                f"{self.name} changed at {answer.host} while it was read",
                "run the same command again: it keeps the fetched pictures, and reads the others from the new file",
            )
        if self.takes_ranges:
            if answer.status == 200:
                raise PassingFault(f"{answer.host} sends the whole file instead of a range")
            found = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+|\*)", answer.headers.get("content-range", ""))
            if not found or int(found[1]) != start or int(found[2]) >= end or found[3] not in ("*", str(self.size)):
                raise PassingFault(f"{answer.host} sends another range than requested")
            if answer.headers.get("content-length") not in (None, str(int(found[2]) + 1 - start)):
                raise PassingFault(f"{answer.host} sends another length than that of the range")
        elif answer.headers.get("content-length") not in (None, str(self.size)):
            raise PassingFault(f"{answer.host} sends another length than before")


def _mark_of(answer: Answer) -> str:
    """Return what identifies a version of the file: its ETag, weak or strong, or else its date; "" without both."""
    return answer.headers.get("etag") or answer.headers.get("last-modified", "")
