"""The central directory of a zip: what it holds and where, read once over ranges and kept on disk."""

from pathlib import Path

import msgspec

from vlmflow.archives.zip_records import Member, Read, read_members
from vlmflow.core.files import whole_file


class Directory(msgspec.Struct, frozen=True):
    """What a zip holds: members by name.

    key: the archive and its version.
    """

    key: str
    members: dict[str, Member]


def kept_directory(kept: Path, key: str, read: Read, size: int) -> Directory:
    """Give the directory of an archive, from `kept` where that is of the same `key`, else read and kept there.

    size: bytes of the archive. Raises Refused where it is no zip, or broken; whatever `read` raises.
    """
    if (found := directory_on_disk(kept, key)) is not None:
        return found
    directory = Directory(key, read_members(read, size))
    with whole_file(kept) as file:
        file.write(msgspec.json.encode(directory))
    return directory


def directory_on_disk(kept: Path, key: str) -> Directory | None:
    """Give the directory that was kept of an archive; None where there is none of this version."""
    try:
        found = msgspec.json.decode(kept.read_bytes(), type=Directory)
    except (OSError, ValueError):
        return None
    return found if found.key == key else None
