"""One file of the hub, brought here: resumed after a break or a kill, checked, and only then named."""

import errno
import fcntl
import hashlib
import logging
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import httpx

from vlmflow.core.errors import PassingError, VlmflowError
from vlmflow.core.files import unfinished
from vlmflow.core.progress import Progress
from vlmflow.web import hub
from vlmflow.web.hub import HubFile
from vlmflow.web.retry import PassingFault, Patience

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT = 30.0
READ_TIMEOUT = 60.0
"""Seconds without a connection, or without a byte, after which an attempt is given up and made anew."""

PROGRESS_BYTES = 1 << 20
"""New bytes that make an attempt count as progress: a line that breaks often passes, one that drips does not."""

BLOCK_BYTES = 1 << 20


class Stopped(Exception):
    """Another download of the same transfer failed; what is here stays and is resumed next time."""


class Transfer:
    """What downloads that run side by side share: one progress line, and the word to stop."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._lock = threading.Lock()
        self._stop = threading.Event()

    def advance(self, count: int) -> None:
        """Count so many bytes as received; less than 0 where bytes had to be dropped."""
        if self._stop.is_set():
            raise Stopped
        with self._lock:
            self._progress.advance(count)

    def pause(self, seconds: float) -> None:
        """Wait, or less where the word to stop comes."""
        if self._stop.wait(seconds):
            raise Stopped

    def stop(self) -> None:
        """Let every download end at its next byte."""
        self._stop.set()


def download(file: HubFile, target: Path, transfer: Transfer) -> str:
    """Bring a file of the hub to `target`, and give its SHA-256.

    The bytes gather in `target` + ".part", which a later call goes on with and which one process at a time
    writes. A `target` that is there already is checked, and fetched again only where its bytes are others.

    Raises VlmflowError where the hub refuses, gives other bytes than it told, or fails too often; Stopped.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _own_part(target, transfer) as handle:
            return _download_alone(file, target, handle, transfer)
    except OSError as error:
        next_step = "free some space there" if error.errno == errno.ENOSPC else "correct that"
        raise PassingError(
            f"{unfinished(target)}: {error.strerror}",
            f"{next_step} and run the same command again: it goes on where it stopped",
        ) from None


def _download_alone(file: HubFile, target: Path, handle: IO[bytes], transfer: Transfer) -> str:
    part = unfinished(target)
    if target.is_file() and target.stat().st_size == file.size:
        with target.open("rb") as present:
            content = _Content(present, file, transfer)
        if content.fits():
            part.unlink()
            return content.sha256.hexdigest()
        transfer.advance(-file.size)
        logger.warning("%s: %s holds other bytes; fetching it again", file, target)
    try:
        content = _complete(file, handle, transfer)
    except (VlmflowError, Stopped):
        if os.fstat(handle.fileno()).st_size == 0:
            part.unlink()
        raise
    os.fsync(handle.fileno())
    part.replace(target)
    return content.sha256.hexdigest()


class _Content:
    """The bytes of a file that are here, and their digests.

    handle: the file, whose present content is read first; open for appending where more is to come.
    """

    def __init__(self, handle: IO[bytes], file: HubFile, transfer: Transfer) -> None:
        self._handle = handle
        self._file = file
        self._transfer = transfer
        self._begin()
        handle.seek(0)
        while block := handle.read(BLOCK_BYTES):
            self._take(block)
        self.pieced = self.size > 0
        if self.size > file.size:
            self.restart()

    def _begin(self) -> None:
        self.size = 0
        self.pieced = False
        """Whether the bytes came in more than one answer."""
        self.validator: str | None = None
        """The ETag under which the last answer gave bytes, for If-Range."""
        self.sha256 = hashlib.sha256()
        # What git calls a file: https://git-scm.com/book/en/v2/Git-Internals-Git-Objects
        self._blob = hashlib.sha1(f"blob {self._file.size}\0".encode(), usedforsecurity=False)

    def _take(self, block: bytes) -> None:
        self.size += len(block)
        self.sha256.update(block)
        if not self._file.sha256:
            self._blob.update(block)

    @property
    def missing(self) -> int:
        return self._file.size - self.size

    def append(self, block: bytes) -> None:
        rest = memoryview(block)
        while rest:
            rest = rest[self._handle.write(rest) :]
        self._take(block)
        self._transfer.advance(len(block))

    def restart(self) -> None:
        """Drop all bytes."""
        self._transfer.advance(-self.size)
        self._handle.truncate(0)
        self._begin()

    def fits(self) -> bool:
        return self.missing == 0 and self._file.etag in (self.sha256.hexdigest(), self._blob.hexdigest())


@contextmanager
def _own_part(target: Path, transfer: Transfer) -> Iterator[IO[bytes]]:
    """Open the unfinished file for this process alone; wait for another process that writes it.

    The one that waits may wake up with a file that has been renamed meanwhile: it opens the name again.
    """
    part = unfinished(target)
    told = False
    while True:
        with part.open("a+b", buffering=0) as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not told:
                    logger.info("%s: another process is fetching it; waiting for that one", target)
                    told = True
                transfer.pause(1.0)
                continue
            if part.exists() and part.stat().st_ino == os.fstat(handle.fileno()).st_ino:
                yield handle
                return


def _complete(file: HubFile, handle: IO[bytes], transfer: Transfer) -> _Content:
    """Receive what is missing, and check the whole; pieces that do not fit are fetched anew, once."""
    content = _Content(handle, file, transfer)
    for _ in range(2):
        _receive_all(file, content, transfer)
        if content.fits():
            return content
        wrong, pieced = content.sha256.hexdigest(), content.pieced
        content.restart()
        if not pieced:
            break
        logger.warning("%s: its pieces are not of one file; fetching it from the start", file)
    raise VlmflowError(
        f"{file}: the bytes received have sha256 {wrong}, the hub's digest of the file is {file.etag}",
        "something on the way alters them: look at proxies and HF_ENDPOINT, then run the same command again",
    )


def _receive_all(file: HubFile, content: _Content, transfer: Transfer) -> None:
    patience = Patience(str(file), transfer.pause)
    furthest = content.size
    timeout = httpx.Timeout(READ_TIMEOUT, connect=CONNECT_TIMEOUT)
    with httpx.Client(follow_redirects=True, timeout=timeout) as client:
        while content.missing:
            try:
                _receive(file, content, client)
            except PassingFault as fault:
                if not content.missing:
                    return
                if content.size >= furthest + PROGRESS_BYTES:
                    furthest = content.size
                    patience.progressed()
                patience.wait(fault)


def _receive(file: HubFile, content: _Content, client: httpx.Client) -> None:
    """Make one attempt: ask the hub for a fresh address, and receive from there what is missing.

    Raises PassingFault where bytes are still missing at its end.
    """
    found, address = hub.look_up(file.source, file.revision, file.path)
    if found != file:
        raise VlmflowError(
            f"{file}: it changed on the hub at the same commit, "
            f"from {file.size} bytes with digest {file.etag} to {found.size} with {found.etag}",
            "do not trust this repository until its owner explains it",
        )
    headers = hub.headers_for(address)
    if content.size:
        headers["range"] = f"bytes={content.size}-"
        if content.validator:
            headers["if-range"] = content.validator
    try:
        with client.stream("GET", address, headers=headers) as response:
            _accept(response, file, content)
            for block in response.iter_raw():
                content.append(block[: content.missing])
                if not content.missing:
                    return
    except httpx.TooManyRedirects:
        raise VlmflowError(
            f"{file}: the redirects of {hub.host_of(address)} go in a circle",
            "look at proxies and HF_ENDPOINT, then run the same command again",
        ) from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise hub.broken_off(error, address) from None
    raise PassingFault(f"{hub.host_of(address)} ended the file {content.missing:,} bytes early")


def _accept(response: httpx.Response, file: HubFile, content: _Content) -> None:
    """Take an answer as the missing bytes, or as the whole file, or refuse it with PassingFault."""
    host = response.url.host
    if response.status_code not in (200, 206):
        if response.status_code == 416:
            content.restart()
        raise PassingFault(f"{host} answers {response.status_code}", hub.asked_wait(response.headers))
    kind = response.headers.get("content-type", "")
    if kind.startswith("text/html") and not file.path.endswith((".html", ".htm")):
        raise PassingFault(f"{host} gives an HTML page in place of the file (a proxy or a login page?)")
    if response.headers.get("content-encoding", "identity") != "identity":
        raise PassingFault(f"{host} gives the file compressed, which was not asked for")
    etag = response.headers.get("etag")
    if response.status_code == 206:
        wanted = rf"bytes {content.size}-\d+/{file.size}"
        if not re.fullmatch(wanted, response.headers.get("content-range", "")):
            content.restart()
            raise PassingFault(f"{host} gives another range than asked for")
        if None not in (content.validator, etag) and content.validator != etag:
            content.restart()
            raise PassingFault(f"{host} gives another file than before")
        content.pieced = True
    else:
        announced = response.headers.get("content-length")
        if announced not in (None, str(file.size)):
            raise PassingFault(f"{host} announces {announced} bytes, the file has {file.size}")
        if content.size:
            logger.warning("%s: %s gives it from the start again", file, host)
            content.restart()
    content.validator = None if etag is None or etag.startswith("W/") else etag
