"""Downloads one file of the hub: resumes after a break or a kill, and names the file only once it is checked.

It does not use huggingface_hub's own downloader: that one writes to a temporary file of its process, so after a kill
the next process downloads a shard of gigabytes from the start.
"""

import errno
import fcntl
import hashlib
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from vlmflow.core.errors import PassingError, VlmflowError
from vlmflow.core.files import BUFFER, unfinished
from vlmflow.core.patience import PassingFault
from vlmflow.fetch import hub
from vlmflow.fetch.hub import HubFile
from vlmflow.fetch.transport import CHECK_PROXIES, Answer, Enough, Refused, Stopped, Transport, host_of

logger = logging.getLogger(__name__)


def download(file: HubFile, target: Path, transport: Transport) -> str:
    """Download a file of the hub to `target`, and return its SHA-256.

    The bytes go to `target` + ".part", which a later call resumes and only one process at a time writes. An existing
    `target` is checked, and fetched again only if its bytes differ.

    Raises VlmflowError if the hub refuses, sends bytes with another digest, or fails too often; Stopped.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _own_part(target, transport) as handle:
            return _download_alone(file, target, handle, transport)
    except OSError as error:
        next_step = "free some space there" if error.errno == errno.ENOSPC else "fix it"
        raise PassingError(
            f"{unfinished(target)}: {error.strerror}",
            f"{next_step} and run the same command again: it resumes where it stopped",
        ) from None


@contextmanager
def _own_part(target: Path, transport: Transport) -> Iterator[IO[bytes]]:
    """Open the unfinished file for this process alone; wait while another process writes it.

    After the wait the open file may have been renamed: then the name is opened again.
    """
    part = unfinished(target)
    told = False
    while True:
        with part.open("a+b", buffering=0) as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not told:
                    logger.info("%s: another process is fetching it; waiting", target)
                    told = True
                transport.pause(1.0)
                continue
            if part.exists() and part.stat().st_ino == os.fstat(handle.fileno()).st_ino:
                yield handle
                return


class _Content:
    """The received bytes of a file, and their digests.

    handle: the file; its present content is read first. Open it for appending if more will come.
    """

    def __init__(self, handle: IO[bytes], file: HubFile, transport: Transport) -> None:
        self._handle = handle
        self._file = file
        self._transport = transport
        self._begin()
        handle.seek(0)
        while block := handle.read(BUFFER):
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
        # The digest of a git blob: https://git-scm.com/book/en/v2/Git-Internals-Git-Objects
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
        """Append the next bytes, without those beyond the file's end. Raises Enough if all are beyond it."""
        wanted = block[: self.missing]
        self._transport.discount(len(block) - len(wanted))
        if not wanted:
            raise Enough
        rest = memoryview(wanted)
        while rest:
            rest = rest[self._handle.write(rest) :]
        self._take(wanted)

    def restart(self) -> None:
        """Drop all bytes."""
        self._transport.discount(self.size)
        self._handle.truncate(0)
        self._begin()

    def fits(self) -> bool:
        return self.missing == 0 and self._file.etag in (self.sha256.hexdigest(), self._blob.hexdigest())


def _download_alone(file: HubFile, target: Path, handle: IO[bytes], transport: Transport) -> str:
    part = unfinished(target)
    if target.is_file() and target.stat().st_size == file.size:
        with target.open("rb") as present:
            content = _Content(present, file, transport)
        if content.fits():
            part.unlink()
            return content.sha256.hexdigest()
        transport.discount(file.size)
        logger.warning("%s: %s has other bytes; fetching it again", file, target)
    try:
        content = _complete(file, handle, transport)
    except (VlmflowError, Stopped):
        if os.fstat(handle.fileno()).st_size == 0:
            part.unlink()
        raise
    os.fsync(handle.fileno())
    part.replace(target)
    return content.sha256.hexdigest()


def _complete(file: HubFile, handle: IO[bytes], transport: Transport) -> _Content:
    """Receive what is missing, and check the whole file; fetch it once more if its pieces do not fit together."""
    content = _Content(handle, file, transport)

    def attempt() -> None:
        try:
            _receive(file, content, transport)
        except PassingFault:
            if content.missing:
                raise

    for _ in range(2):
        if content.missing:
            transport.patiently(str(file), attempt, lambda: content.size)
        if content.fits():
            return content
        wrong, pieced = content.sha256.hexdigest(), content.pieced
        content.restart()
        if not pieced:
            break
        logger.warning("%s: its pieces do not belong to one file; fetching it from the start", file)
    raise VlmflowError(
        f"{file}: the received bytes have sha256 {wrong}, the hub's digest of the file is {file.etag}",
        "something on the way changes them: check proxies and HF_ENDPOINT, then run the same command again",
    )


def _receive(file: HubFile, content: _Content, transport: Transport) -> None:
    """Make one attempt: ask the hub for a new address, and receive from there what is missing.

    Raises PassingFault if bytes are still missing afterwards.
    """
    now, address = hub.look_up(file.source, file.revision, file.path)
    if now != file:
        raise VlmflowError(
            f"{file}: it changed on the hub at the same commit, "
            f"from {file.size} bytes with digest {file.etag} to {now.size} with {now.etag}",
            "do not trust this repository until its owner explains it",
        )
    headers = hub.headers_for(address)
    if content.size:
        headers["range"] = f"bytes={content.size}-"
        if content.validator:
            headers["if-range"] = content.validator
    try:
        transport.get(address, headers, lambda answer: _accept(answer, file, content), content.append)
    except Refused as refusal:
        raise VlmflowError(f"{file}: {refusal}", CHECK_PROXIES) from None
    if content.missing:
        raise PassingFault(f"{host_of(address)} ended the file {content.missing:,} bytes early")


def _accept(answer: Answer, file: HubFile, content: _Content) -> None:
    """Accept an answer as the missing bytes or as the whole file. Raises PassingFault for any other."""
    if answer.status == 416:
        content.restart()
    if problem := answer.problem(200, 206):
        raise answer.fault(problem)
    etag = answer.headers.get("etag")
    if answer.status == 206:
        wanted = rf"bytes {content.size}-\d+/{file.size}"
        if not re.fullmatch(wanted, answer.headers.get("content-range", "")):
            content.restart()
            raise PassingFault(f"{answer.host} sends another range than requested")
        if None not in (content.validator, etag) and content.validator != etag:
            content.restart()
            raise PassingFault(f"{answer.host} sends another file than before")
        content.pieced = True
    else:
        announced = answer.headers.get("content-length")
        if announced not in (None, str(file.size)):
            raise PassingFault(f"{answer.host} announces {announced} bytes, the file has {file.size}")
        if content.size:
            logger.warning("%s: %s sends it from the start again", file, answer.host)
            content.restart()
    content.validator = None if etag is None or etag.startswith("W/") else etag
