"""The manifest of a folder in object storage: its files and their objects. Written last, it makes the folder valid."""

import json
import re
from dataclasses import dataclass
from typing import Any

from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import lies_within

NAME = ".manifest.json"
"""The key of the manifest below the folder's own."""

LARGEST = 64_000_000
"""The most bytes of a manifest that are read, some 300,000 files: jobs write manifests, the main process reads them."""

_OBJECT = re.compile(r"(?P<attempt>(?P<target>.+)/\.stored-[0-9a-f]{32})/files/.+", re.DOTALL)


@dataclass(frozen=True)
class Entry:
    """One file: its size in bytes, its SHA-256 in hexadecimal, and the key of its object in the bucket.

    Manifests of older checkouts have the object's ETag, with its quotes, instead of the SHA-256.
    """

    size: int
    key: str
    sha256: str | None = None
    etag: str | None = None

    @property
    def attempt(self) -> str | None:
        """The key of the attempt that uploaded the object, for this folder or another; None in an older manifest."""
        found = _OBJECT.fullmatch(self.key)
        return found["attempt"] if found else None


def attempts_of(entries: dict[str, Entry]) -> set[str]:
    """Return the keys of the attempts whose objects a manifest names."""
    return {entry.attempt for entry in entries.values() if entry.attempt}


def owner_of(attempt: str) -> str:
    """Return the folder's key from an attempt's key."""
    return attempt.rpartition("/.stored-")[0]


def dump(entries: dict[str, Entry]) -> bytes:
    """Return the bytes of a manifest. entries: by the file's path below the folder, with slashes.

    Raises VlmflowError if there are too many.
    """
    files = {
        name: {"size": entry.size, "sha256": entry.sha256, "key": entry.key} for name, entry in sorted(entries.items())
    }
    content = (json.dumps({"version": 1, "files": files}, indent=1, ensure_ascii=False) + "\n").encode()
    if len(content) > LARGEST:
        what = f"a folder has {len(files):,} files: its manifest is larger than {LARGEST // 1_000_000} MB"
        raise VlmflowError(what, "make the rule write fewer files, or pack them")
    return content


def load(content: bytes, place: str, folder: str) -> dict[str, Entry]:
    """Parse a manifest; returns its entries by the file's path. place: its address, for messages. folder: its key.

    Raises VlmflowError if it is not a manifest, or names a file outside the folder.
    """
    if len(content) > LARGEST:
        raise _broken(place, f"is larger than {LARGEST // 1_000_000} MB")
    try:
        said = json.loads(content)
        known = said.get("version", 0)
        entries = {name: _entry(name, each, known, folder) for name, each in said["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _broken(place, f"is not a manifest ({type(error).__name__}: {error})") from None
    for name in entries:
        if not lies_within(name):
            raise _broken(place, f"names a file outside its folder, or one that no folder has: {name!r}")
    return entries


def _entry(name: str, said: dict[str, Any], version: int, folder: str) -> Entry:
    size = said["size"]
    if not isinstance(size, int) or size < 0:
        raise ValueError(f"{name}: invalid size {size!r}")
    if version == 0:
        return Entry(size, f"{folder}/{name}", etag=str(said["etag"]))
    if version != 1:
        raise ValueError(f"version {version!r}, which this checkout does not support")
    if not re.fullmatch(r"[0-9a-f]{64}", said["sha256"]) or not _OBJECT.fullmatch(said["key"]):
        raise ValueError(f"{name}: invalid sha256 or key: {said}")
    return Entry(size, said["key"], sha256=said["sha256"])


def _broken(place: str, what: str) -> VlmflowError:
    return VlmflowError(
        f"{place} {what}", "remove it and run the same command again: the workflow recreates its folder"
    )
