"""What makes a folder in object storage whole: a list of its files, written last."""

import json
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath

from vlmflow.errors import VlmflowError

NAME = ".manifest.json"
"""The key of the manifest below the folder's own."""


@dataclass(frozen=True)
class Entry:
    """One file: its size in bytes, and the ETag that the storage gave it (quotes and all)."""

    size: int
    etag: str


def dump(entries: dict[str, Entry]) -> bytes:
    """Write a manifest. entries: by the file's path below the folder, with slashes."""
    files = {name: asdict(entry) for name, entry in sorted(entries.items())}
    return (json.dumps({"files": files}, indent=1, ensure_ascii=False) + "\n").encode()


def load(content: bytes, place: str) -> dict[str, Entry]:
    """Read a manifest. place: its address, for messages.

    Raises VlmflowError where it is none, or names a file outside the folder.
    """
    try:
        files = json.loads(content)["files"]
        entries = {name: Entry(int(entry["size"]), str(entry["etag"])) for name, entry in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _broken(place, f"is no manifest ({type(error).__name__}: {error})") from None
    for name in entries:
        if not _lies_within(name):
            raise _broken(place, f"names a file outside its folder: {name!r}")
    return entries


def differences(wanted: dict[str, Entry], present: dict[str, Entry]) -> list[str]:
    """Say of each file of a manifest that the storage does not hold as it was stored, what is wrong with it."""
    return [
        f"{name}: not there" if name not in present else f"{name}: {present[name]} instead of {entry}"
        for name, entry in wanted.items()
        if present.get(name) != entry
    ]


def _lies_within(name: str) -> bool:
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and str(path) == name != NAME


def _broken(place: str, what: str) -> VlmflowError:
    return VlmflowError(f"{place} {what}", "remove it and run the same command again: its folder is made anew")
