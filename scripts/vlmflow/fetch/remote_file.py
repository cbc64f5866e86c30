"""One file on an HTTP server over an unreliable network: read in ranges by several threads, or downloaded whole."""

import hashlib
import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from vlmflow.core.errors import PassingError, VlmflowError
from vlmflow.core.files import require_free_disk, unfinished
from vlmflow.core.patience import PassingFault
from vlmflow.fetch import hub
from vlmflow.fetch.transport import Accept, Answer, Enough, Refused, Sink, Transport, host_of

Digests = Mapping[str, str | None]
"""The expected digests of a file by algorithm (md5, sha256); None if unknown."""

logger = logging.getLogger(__name__)


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
            first = bytearray()

            def take(block: bytes) -> None:
                first.extend(block)
                if len(first) > 1:  # more than was requested, perhaps without end
                    raise Enough

            self._request({"range": "bytes=0-0"}, learn, take)

        if not self._opened:
            self._transport.patiently(self.name, attempt)
            self._opened = True

    def _learn(self, answer: Answer) -> None:
        self.takes_ranges = answer.status == 206
        header, begins = ("content-range", "bytes 0-0/") if self.takes_ranges else ("content-length", "")
        reported = re.fullmatch(rf"{begins}([0-9]{{1,19}})", answer.headers.get(header, ""))
        if reported is None:
            raise Refused("refused", f"{answer.host} does not report its size")
        size = int(reported[1])
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
        position = start

        def take(block: bytes) -> None:
            nonlocal position
            wanted = block[: end - position]
            if not wanted:
                raise Enough
            sink(wanted)
            position += len(wanted)

        def attempt() -> None:
            nonlocal position
            if not self.takes_ranges and position:
                restart()
                position = 0
            headers = {"range": f"bytes={position}-{end - 1}"} if self.takes_ranges else {}
            if self._mark.startswith('"'):  # If-Range needs a strong ETag (RFC 9110, 13.1.5)
                headers["if-range"] = self._mark
            first = position
            self._request(headers, lambda answer: self._accept(answer, first, end), take)
            if position < end:
                raise PassingFault(f"{host_of(self._address or '')} ended {end - position:,} bytes early")

        self._transport.patiently(self.name, attempt, lambda: position - start)

    def _request(self, headers: dict[str, str], accept: Accept, sink: Sink) -> None:
        """Request the file. Raises PassingFault, or Refused for a refusal before the first successful answer."""
        address, own_headers = self._address, self._headers
        if address is None:
            address = self._find()
            own_headers = hub.headers_for(address)

        def accept_file(answer: Answer) -> None:
            if self._address != answer.address:  # from now on directly where the redirects ended
                self._headers = hub.headers_for(answer.address)
                self._address = answer.address
            if problem := answer.problem(200, 206):
                self._address = None  # a signed address may have expired
                raise answer.fault(problem) if answer.may_pass or self._opened else Refused("refused", problem)
            accept(answer)

        self._transport.get(address, {**own_headers, **headers}, accept_file, sink)

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
            sent = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+|\*)", answer.headers.get("content-range", ""))
            if not sent or int(sent[1]) != start or int(sent[2]) >= end or sent[3] not in ("*", str(self.size)):
                raise PassingFault(f"{answer.host} sends another range than requested")
            if answer.headers.get("content-length") not in (None, str(int(sent[2]) + 1 - start)):
                raise PassingFault(f"{answer.host} sends another length than that of the range")
        elif answer.headers.get("content-length") not in (None, str(self.size)):
            raise PassingFault(f"{answer.host} sends another length than before")


def _mark_of(answer: Answer) -> str:
    """Return what identifies a version of the file: its ETag, weak or strong, or else its date; "" without both."""
    return answer.headers.get("etag") or answer.headers.get("last-modified", "")


def name_on_disk(remote: RemoteFile, folder: Path) -> Path:
    """Return the file for an open remote file in a folder; each version has another name."""
    version = "".join(letter for letter in remote.version if letter.isalnum())[:40]
    return folder / f"{version}-{remote.size}-{remote.name.rpartition('/')[2]}"


def fetch_whole(remote: RemoteFile, target: Path, digests: Digests) -> None:
    """Download an open remote file to `target`, which gets its name only once it is checked; resumes after a kill.

    target: its name includes the file's version; an existing file of the right size is kept. Only the caller writes
    there.

    Raises VlmflowError if it does not fit on the disk, or a digest differs; what `RemoteFile.stream` raises.
    """
    if target.is_file() and target.stat().st_size == remote.length:
        return
    part = unfinished(target)
    with part.open("ab") as file:
        if file.tell() > remote.length or not remote.takes_ranges:
            file.truncate(0)
        require_free_disk(target.parent, remote.length - file.tell(), remote.name)
        if file.tell():
            logger.info("%s: resuming at byte %s of %s", remote.name, f"{file.tell():,}", f"{remote.length:,}")
        if file.tell() < remote.length:
            remote.stream(file.tell(), remote.length, file.write, lambda: file.truncate(0))
    for algorithm, expected in digests.items():
        if expected is None:
            continue
        with part.open("rb") as file:
            received = hashlib.file_digest(file, algorithm).hexdigest()
        if received != expected:
            part.unlink()
            raise VlmflowError(
                f"{remote.name}: the received file has {algorithm} {received}, expected {expected}",
                "something on the way changes it, or its owner changed it: find out which before you use it",
            )
    part.replace(target)
