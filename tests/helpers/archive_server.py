"""A local server of archives and pictures, with ranges and faults on demand, and the stage that fetches from it."""

import io
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import msgspec
import pytest

from faulty_server import Answer, Fault, FaultyHandler, FaultyServer
from hub_server import sha256
from vlmflow.config.tables import PictureSource, Pin
from vlmflow.core import patience
from vlmflow.fetch.fetch_pictures import PictureFetch
from vlmflow.pictures.roots import PictureRoots


def strong_etag(content: bytes) -> str:
    return f'"{sha256(content)[:16]}"'


@dataclass
class Seen:
    path: str
    range: str | None
    if_range: str | None
    sent: int = 0
    """Bytes of the body that were sent."""

    def count(self, sent: int) -> None:
        self.sent += sent


class ArchiveServer(FaultyServer):
    """Serves `files`, by path, until its `with` block ends.

    faults: by path, the faults of the next answers, in order; None is an answer without a fault.
    always: by path, the fault of all other answers.
    ranges: whether it answers with ranges. etag_of: returns the ETag of a file's bytes; None for no ETag.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.etag_of: Callable[[bytes], str | None] = strong_etag
        self.faults: dict[str, list[Fault | None]] = {}
        self.always: dict[str, Fault] = {}
        self.ranges = True
        self.seen: list[Seen] = []
        super().__init__()
        self.base = f"http://127.0.0.1:{self.port}"

    def handler(self) -> type[BaseHTTPRequestHandler]:
        return _handler_for(self)

    def change(self, path: str, content: bytes, after: int) -> Fault:
        """Return a fault: the answer ends after `after` bytes, and from then on the file has other content."""

        def fault(answer: Answer) -> Answer:
            self.files[path] = content
            return replace(answer, stop_after=after, end="close")

        return fault

    def sent(self, path: str) -> int:
        """Return how many bytes of a file were sent, over all requests."""
        return sum(seen.sent for seen in self.seen if seen.path == path)

    def ranges_of(self, path: str) -> list[str | None]:
        return [seen.range for seen in self.seen if seen.path == path]


def _handler_for(server: ArchiveServer) -> type[BaseHTTPRequestHandler]:
    class Handler(FaultyHandler):
        def do_GET(self) -> None:
            path = unquote(self.path.partition("?")[0]).lstrip("/")
            seen = Seen(path, self.headers.get("Range"), self.headers.get("If-Range"))
            with server.lock:
                server.seen.append(seen)
                waiting = server.faults.get(path)
                fault = waiting.pop(0) if waiting else server.always.get(path)
            answer = self._answer(path)
            self.send(fault(answer) if fault else answer, server.pace, seen.count)

        def _answer(self, path: str) -> Answer:
            content = server.files.get(path)
            if content is None:
                return Answer(404, {}, b"no such file")
            etag = server.etag_of(content)
            headers = {"Content-Type": "application/octet-stream", **({"ETag": etag} if etag else {})}
            wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            if not wanted or not server.ranges or self.headers.get("If-Range", etag) != etag:
                return Answer(200, headers, content, content)
            start, end = int(wanted[1]), min(int(wanted[2] or len(content) - 1), len(content) - 1)
            if start > end:
                return Answer(416, {"Content-Range": f"bytes */{len(content)}"})
            headers["Content-Range"] = f"bytes {start}-{end}/{len(content)}"
            return Answer(206, headers, content[start : end + 1], content)

    return Handler


@contextmanager
def served_archives(monkeypatch: pytest.MonkeyPatch) -> Iterator[ArchiveServer]:
    """Serve, with short waits between attempts, in this process only.

    A server may pause for 10 s, longer than a busy machine needs, so that no request is made twice.
    """
    with ArchiveServer() as server:
        monkeypatch.setattr(patience, "FIRST_WAIT", 0.01)
        monkeypatch.setattr(patience, "LONGEST_WAIT", 0.05)
        monkeypatch.setattr(patience, "READ_TIMEOUT", 10)
        yield server


class _Unseekable(io.BytesIO):
    """Looks like a pipe to `zipfile`, which then writes data descriptors after the members."""

    def seekable(self) -> bool:
        return False

    def seek(self, *_: object) -> int:
        raise OSError

    def tell(self) -> int:
        raise OSError


def zip_of(
    members: Mapping[str, bytes], deflate: bool = False, zip64: bool = False, descriptors: bool = False
) -> bytes:
    """Return a zip. zip64: sizes and offsets are in extra fields. descriptors: and after the members."""
    file = _Unseekable() if descriptors else io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in members.items():
            info = zipfile.ZipInfo(name)
            info.compress_type = zipfile.ZIP_DEFLATED if deflate else zipfile.ZIP_STORED
            with archive.open(info, "w", force_zip64=zip64) as member:
                member.write(content)
    return file.getvalue()


MAX_BYTES = 1_000_000
"""The most bytes of a picture."""


def fetch(
    store: Path,
    sources: dict[str, PictureSource],
    paths: Sequence[str],
    roots: Sequence[str] = (),
    pins: Mapping[str, Pin] = {},
) -> dict[str, Any]:
    """Fetch the pictures, each named by two rows, and return the account as in its file."""
    store.mkdir(exist_ok=True, parents=True)
    fetching = PictureFetch(sources, pins, store, MAX_BYTES, "test")
    account = fetching.fetch(dict.fromkeys(paths, 2), PictureRoots([*roots, str(store)], "roots"))
    return msgspec.to_builtins(account)


def pictures_in(store: Path) -> dict[str, bytes]:
    """Return the content of every file in a store that has a picture's name."""
    return {
        str(file.relative_to(store)): file.read_bytes()
        for file in store.rglob("*")
        if file.is_file() and ".archives" not in file.parts
    }
