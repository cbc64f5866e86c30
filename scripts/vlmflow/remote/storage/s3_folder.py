"""A folder in a bucket: objects of attempts, and a manifest that names the folder's objects.

    FOLDER/.manifest.json                      size, SHA-256 and object of every file; written last
    FOLDER/.stored-TOKEN/files/NAME            the objects of one attempt; no other writer has its token

Why a folder is complete or missing, with any number of writers: a writer uploads only under its own token, and then the
manifest in one request. So each manifest names one attempt's objects, which nobody changes. Objects that no manifest
names (of a killed writer, or of a replaced version) are deleted by a later writer of the folder when the newest of the
attempt is a day old, so never a live writer's.

If this job downloaded a file with another folder and did not change it, the storage copies the file by itself.
"""

import json
import re
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

from botocore.exceptions import BotoCoreError, ClientError
from s3transfer.exceptions import S3CopyFailedError

from vlmflow.remote.library import FOLDER_MARK, VlmflowError, lies_within, remove, sha256_of, unfinished

NAME = ".manifest.json"
"""The key of the manifest below the folder's own."""

LARGEST = 64_000_000
"""The most bytes of a manifest that are read, some 300,000 files: jobs write manifests, the main process reads them."""

LEFT_AFTER = timedelta(days=1)
NOT_THERE = {"404", "NoSuchKey", "NoSuchBucket"}

_OBJECT = re.compile(r"(?P<attempt>.+/\.stored-[0-9a-f]{32})/files/.+", re.DOTALL)

_retrieved: dict[tuple[str, str, int], tuple[str, str]] = {}
"""What this process of a job has downloaded: the object's key and ETag, by bucket, SHA-256 and size."""


@dataclass(frozen=True)
class Entry:
    """One file of a folder: its size in bytes, its SHA-256 in hexadecimal, and the key of its object in the bucket."""

    size: int
    sha256: str
    key: str


def dump(entries: dict[str, Entry]) -> bytes:
    """Return the bytes of a manifest. entries: by the file's path below the folder, with slashes.

    Raises VlmflowError if there are too many.
    """
    files = {name: asdict(entry) for name, entry in sorted(entries.items())}
    content = (json.dumps({"version": 1, "files": files}, indent=1, ensure_ascii=False) + "\n").encode()
    if len(content) > LARGEST:
        cause = f"a folder has {len(files):,} files: its manifest is larger than {LARGEST // 1_000_000} MB"
        raise VlmflowError(cause, "make the rule write fewer files, or pack them")
    return content


def load(content: bytes, address: str) -> dict[str, Entry]:
    """Parse a manifest; returns its entries by the file's path. address: its own, for messages.

    Raises VlmflowError if it is not a manifest, or names a file outside the folder.
    """
    if len(content) > LARGEST:
        raise _broken(address, f"is larger than {LARGEST // 1_000_000} MB")
    try:
        manifest = json.loads(content)
        if manifest["version"] != 1:
            raise ValueError(f"version {manifest['version']!r}, which this checkout does not support")
        entries = {name: _entry(name, **fields) for name, fields in manifest["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _broken(address, f"is not a manifest ({type(error).__name__}: {error})") from None
    for name in entries:
        if not lies_within(name):
            raise _broken(address, f"names a file outside its folder, or one that no folder has: {name!r}")
    return entries


def _entry(name: str, size: Any, sha256: Any, key: Any, **_: Any) -> Entry:
    if not isinstance(size, int) or size < 0:
        raise ValueError(f"{name}: invalid size {size!r}")
    if not re.fullmatch(r"[0-9a-f]{64}", sha256) or not _OBJECT.fullmatch(key):
        raise ValueError(f"{name}: invalid sha256 or key: {sha256}, {key}")
    return Entry(size, sha256, key)


def _broken(address: str, fault: str) -> VlmflowError:
    return VlmflowError(
        f"{address} {fault}", "remove it and run the same command again: the workflow recreates its folder"
    )


def attempts_of(entries: dict[str, Entry]) -> set[str]:
    """Return the keys of the attempts whose objects a manifest names, of this folder or of another."""
    return {match["attempt"] for entry in entries.values() if (match := _OBJECT.fullmatch(entry.key))}


class Folder:
    """A folder of a bucket. bucket: boto3's object. key: the folder's key, without a slash at its end."""

    def __init__(self, bucket: Any, key: str) -> None:
        self.bucket, self.key, self.address = bucket, key, f"s3://{bucket.name}/{key}"

    @property
    def manifest(self) -> Any:
        """The manifest's object, which makes the folder valid."""
        return self.bucket.Object(f"{self.key}/{NAME}")

    def entries(self) -> dict[str, Entry] | None:
        """Return what the manifest names; None if it does not exist.

        Raises VlmflowError if it is not a manifest.
        """
        try:
            content = self.manifest.get()["Body"].read(LARGEST + 1)
        except ClientError as error:
            if is_not_there(error):
                return None
            raise
        return load(content, f"{self.address}/{NAME}")

    def content(self, name: str, limit: int) -> bytes | None:
        """Return the first bytes of a file, at most `limit`; None if the folder has no such file, or does not exist."""
        entry = (self.entries() or {}).get(name)
        return None if entry is None else bytes(self.bucket.Object(entry.key).get()["Body"].read(limit))

    def retrieve(self, local: Path) -> None:
        """Download the folder; it gets the name `local` once every file's SHA-256 matches the manifest.

        Raises VlmflowError if an object is missing or differs from the manifest, FileNotFoundError if the folder does
        not exist.
        """
        part = unfinished(local)
        while True:
            remove(part)
            part.mkdir(parents=True)
            entries = self.entries()
            if entries is None:
                raise FileNotFoundError(self.address)
            try:
                etags = {name: self._download(name, entry, part / name) for name, entry in entries.items()}
                break
            except VlmflowError:
                if self.entries() == entries:  # otherwise another writer has replaced it meanwhile
                    raise
        remove(local)
        part.rename(local)
        for name, entry in entries.items():
            _retrieved[self.bucket.name, entry.sha256, entry.size] = entry.key, etags[name]

    def _download(self, name: str, entry: Entry, file: Path) -> str:
        """Download a file, and return the object's ETag."""
        file.parent.mkdir(parents=True, exist_ok=True)
        source = self.bucket.Object(entry.key)
        try:
            source.load()
            source.download_file(str(file))
        except ClientError as error:
            if is_not_there(error):
                raise damaged(self.address, f"{name}: missing") from None
            raise
        if file.stat().st_size != entry.size:
            raise damaged(self.address, f"{name}: {file.stat().st_size} bytes instead of {entry.size}")
        if (digest := sha256_of(file)) != entry.sha256:
            raise damaged(self.address, f"{name}: sha256 {digest} instead of {entry.sha256}")
        return str(source.e_tag)

    def store(self, local: Path) -> None:
        """Upload what is not in storage yet, and then the manifest. Until then the earlier version stays valid.

        Raises VlmflowError if the storage does not have what was sent.
        """
        attempt, entries = f"{self.key}/.stored-{uuid4().hex}", {}
        for path in sorted(local.rglob("*")):
            if path.is_file() and path.name != FOLDER_MARK:
                name = path.relative_to(local).as_posix()
                entries[name] = Entry(path.stat().st_size, sha256_of(path), f"{attempt}/files/{name}")
                self._send(path, entries[name])
        sent = {item.key: item.size for item in self._below(attempt)}
        for name, entry in entries.items():
            if sent.get(entry.key) != entry.size:
                fault = f"{name}: {entry.size} bytes were sent, the storage has {sent.get(entry.key)}"
                raise damaged(self.address, fault)
        self.manifest.put(Body=dump(entries))
        self._delete_what_killed_writers_left()

    def _send(self, path: Path, entry: Entry) -> None:
        """Copy a file within the storage if its content is there, else upload it."""
        target = self.bucket.Object(entry.key)
        if (self.bucket.name, entry.sha256, entry.size) in _retrieved:
            source, etag = _retrieved[self.bucket.name, entry.sha256, entry.size]
            # It has gone or changed meanwhile, or the server copies nothing (KeyError: it answers as to an upload).
            with suppress(ClientError, BotoCoreError, S3CopyFailedError, KeyError):
                target.copy({"Bucket": self.bucket.name, "Key": source}, ExtraArgs={"CopySourceIfMatch": etag})
                if target.content_length == entry.size:
                    return
        target.upload_file(str(path))

    def remove(self) -> None:
        """Remove the folder: its manifest first, then its objects."""
        entries = self.entries() or {}
        self.manifest.delete()
        for attempt in attempts_of(entries):
            if attempt.rpartition("/.stored-")[0] == self.key:
                self._delete(attempt)
        self._delete_what_killed_writers_left()

    def _delete_what_killed_writers_left(self) -> None:
        # By the storage's own time, which also dates its objects.
        answer = self.bucket.meta.client.head_bucket(Bucket=self.bucket.name)
        now = parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"])
        newest: dict[str, datetime] = {}
        for item in self.bucket.objects.filter(Prefix=f"{self.key}/.stored-"):
            attempt = "/".join(item.key.split("/")[: self.key.count("/") + 2])
            newest[attempt] = max(newest.get(attempt, item.last_modified), item.last_modified)
        for attempt in (attempt for attempt, changed in newest.items() if now - changed > LEFT_AFTER):
            if attempt not in attempts_of(self.entries() or {}):
                self._delete(attempt)

    def _delete(self, attempt: str) -> None:
        for item in self._below(attempt):
            item.delete()

    def _below(self, attempt: str) -> list[Any]:
        return list(self.bucket.objects.filter(Prefix=f"{attempt}/"))


def damaged(address: str, fault: str) -> VlmflowError:
    """Return the error for a target in storage whose bytes are not those that were stored."""
    step = "remove it there and run the same command again: the workflow recreates it"
    return VlmflowError(f"{address} is damaged: {fault}", step)


def is_not_there(error: ClientError) -> bool:
    """Return whether an error means that the object or bucket does not exist."""
    return error.response["Error"]["Code"] in NOT_THERE
