"""Downloads a target that a run made in S3.

Killed, it resumes: whole files are kept, and a file continues where its bytes end. Every file's SHA-256 is compared
with the one that the run recorded, also of what was already here.
"""

import hashlib
import logging
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Event
from typing import IO, Any
from urllib.parse import urlparse

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from vlmflow.remote import library
from vlmflow.remote.library import BUFFER, PassingError, PassingFault, Progress, VlmflowError, printable
from vlmflow.remote.storage.s3_folder import Entry, Folder, is_not_there

log = logging.getLogger("vlmflow")

PIECE = 16 << 20
STREAMS = 8
"""Bytes of one request, and requests at a time: one connection alone does not fill the line to S3. Their product is the
memory that a download takes."""

OTHER = {"InvalidRange", "PreconditionFailed"}
"""S3's error codes for an object that is not the one that was recorded."""


def main(address: str, local: Path) -> None:
    """Download a folder or a file; it gets the name `local` once every SHA-256 matches.

    address: s3://BUCKET/TARGET. Server and keys come from the storage plugin's variables SNAKEMAKE_STORAGE_S3_…, or
    from those of AWS.

    Raises VlmflowError if the target is damaged or missing, if S3 cannot be reached, or if `local` already exists.
    """
    parts = urlparse(address)
    key = parts.path.strip("/")
    if parts.scheme != "s3" or not parts.netloc or not key:
        raise VlmflowError(
            f"{address}: not the address of a target in S3", "write: vlmflow cluster get TARGET --from s3://BUCKET"
        )
    if local.exists():
        raise VlmflowError(f"{local} already exists", "name another folder behind the target, or remove it")
    try:
        compared = _Download(_server().Bucket(parts.netloc), key).to(local)
    except (ClientError, BotoCoreError, FileNotFoundError) as error:
        raise VlmflowError(
            f"{address}: cannot download it ({type(error).__name__}: {printable(str(error))})",
            "check that the run has made it, and that SNAKEMAKE_STORAGE_S3_… set its server and keys",
        ) from None
    except OSError as error:
        raise PassingError(f"{error.filename or local}: {error.strerror}", f"fix it, then {library.AGAIN}") from None
    digests = "every file has the digest of the original" if compared else "it has no recorded digest to compare"
    log.info(f"copied {address} to {local}; {digests}")


def _server() -> Any:
    return boto3.resource(
        "s3",
        endpoint_url=os.environ.get("SNAKEMAKE_STORAGE_S3_ENDPOINT_URL"),
        aws_access_key_id=os.environ.get("SNAKEMAKE_STORAGE_S3_ACCESS_KEY"),
        aws_secret_access_key=os.environ.get("SNAKEMAKE_STORAGE_S3_SECRET_KEY"),
        config=Config(
            connect_timeout=library.CONNECT_TIMEOUT,
            read_timeout=library.READ_TIMEOUT,
            # _piece is more patient, and says what it waits for.
            retries={"mode": "standard", "total_max_attempts": 2},
            max_pool_connections=STREAMS,
        ),
    )


class _Download:
    """One target in a bucket. bucket: boto3's object. key: that of the target."""

    def __init__(self, bucket: Any, key: str) -> None:
        self._bucket, self._key, self._folder = bucket, key, Folder(bucket, key)
        self._conditions: dict[str, str] = {}
        self._ended = Event()

    def to(self, local: Path) -> bool:
        """Download it; return whether every file was compared with a digest: somebody may have put a file there.

        Raises as `main`, and what boto3 raises; FileNotFoundError if there is no such target.
        """
        entries = self._folder.entries()
        if entries is None:
            return self._file(local)
        with library.whole_folder(local, resumed=True) as part:
            while True:
                self._ended.clear()  # the requests of an earlier version are over
                try:
                    self._files(entries, part)
                    return True
                except PassingError:
                    raise
                except VlmflowError:
                    newer = self._folder.entries()
                    # Otherwise another writer has replaced it meanwhile.
                    if newer is None or newer == entries:
                        raise
                    entries = newer

    def _files(self, entries: dict[str, Entry], part: Path) -> None:
        """Complete the files of a folder. part: holds those of an earlier attempt, perhaps of another version."""
        for left in sorted(part.rglob("*"), reverse=True):
            if left.is_symlink() or not left.is_dir():
                name = left.relative_to(part).as_posix()
                if name not in entries or left.is_symlink() or left.stat().st_size > entries[name].size:
                    library.remove(left)
            elif not any(left.iterdir()):
                left.rmdir()
        here = sum(left.stat().st_size for left in part.rglob("*") if left.is_file())
        total = sum(entry.size for entry in entries.values())
        with Progress(f"get {self._key}", total, "bytes") as progress:
            progress.start_at(here)
            library.require_free_disk(part, total - here, self._folder.address)
            for name, entry in entries.items():
                target = part / name
                target.parent.mkdir(parents=True, exist_ok=True)
                with target.open("a+b") as file:
                    self._complete(name, entry, file, progress)

    def _file(self, local: Path) -> bool:
        """Download a target that is one object; return as `to`."""
        stored = self._bucket.Object(self._key)
        try:
            stored.load()
        except ClientError as error:
            if is_not_there(error):
                raise FileNotFoundError(self._folder.address) from None
            raise
        entry = Entry(stored.content_length, stored.metadata.get("sha256", ""), self._key)
        self._conditions = {"IfMatch": stored.e_tag}
        with library.whole_file(local) as file, Progress(f"get {self._key}", entry.size, "bytes") as progress:
            self._complete("the file", entry, file, progress)
        return bool(entry.sha256)

    def _complete(self, name: str, entry: Entry, file: IO[bytes], progress: Progress) -> None:
        """Append what a file lacks, and compare all of it; once more from the start if its pieces do not fit together.

        file: may have bytes of an earlier attempt if it can be read.
        """
        size = file.tell()
        while True:
            digest = hashlib.sha256()
            if size:
                file.seek(0)
                for block in iter(partial(file.read, BUFFER), b""):
                    digest.update(block)
            for piece in self._pieces(name, entry, size):
                file.write(piece)
                digest.update(piece)
                progress.advance(len(piece))
            if entry.sha256 in ("", digest.hexdigest()):
                return
            file.seek(0)
            file.truncate()
            progress.advance(-entry.size)
            if not size:
                raise self._damaged(name, f"sha256 {digest.hexdigest()} instead of {entry.sha256}")
            log.warning(f"{printable(name)}: what was here is not its beginning; downloading it from the start")
            size = 0

    def _pieces(self, name: str, entry: Entry, start: int) -> Iterator[bytes]:
        """Yield an object's bytes from `start` on, in order."""
        waiting: deque[Any] = deque()
        pool = ThreadPoolExecutor(STREAMS)
        try:
            for begin in range(start, entry.size, PIECE):
                waiting.append(pool.submit(self._piece, name, entry, begin, min(begin + PIECE, entry.size)))
                if len(waiting) == STREAMS:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
            pool.shutdown()
        except BaseException:
            self._ended.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise

    def _piece(self, name: str, entry: Entry, begin: int, end: int) -> bytearray:
        """Return the bytes `begin` to `end` of an object."""
        content = bytearray()
        wanted = {"Bucket": self._bucket.name, "Key": entry.key, **self._conditions}

        def receive() -> None:
            try:
                span = f"bytes={begin + len(content)}-{end - 1}"
                answer = self._bucket.meta.client.get_object(Range=span, **wanted)
                if not answer.get("ContentRange", "").startswith(f"bytes {begin + len(content)}-"):
                    raise self._damaged(name, "the server does not send the range that was asked for")
                for block in answer["Body"].iter_chunks(BUFFER):
                    content.extend(block)
            except ClientError as error:
                code = error.response["Error"]["Code"]
                if is_not_there(error):
                    raise self._damaged(name, "missing") from None
                if code in OTHER:
                    raise self._damaged(name, "its object has changed") from None
                if error.response["ResponseMetadata"]["HTTPStatusCode"] in library.PASSING_STATUS:
                    raise PassingFault(f"S3 answers {code}") from None
                raise
            except BotoCoreError as error:
                if self._ended.is_set():
                    raise
                raise PassingFault(f"the connection to S3 broke ({type(error).__name__})") from None
            if len(content) < end - begin:
                raise PassingFault(f"S3 ended the answer {end - begin - len(content):,} bytes early")

        subject = f"{self._folder.address}: {printable(name)}"
        library.patiently(subject, receive, lambda: len(content), self._ended.wait)
        return content[: end - begin]

    def _damaged(self, name: str, fault: str) -> VlmflowError:
        return VlmflowError(
            f"{self._folder.address} is damaged: {printable(name)}: {fault}",
            "remove it there and run the workflow again, which recreates it",
        )
