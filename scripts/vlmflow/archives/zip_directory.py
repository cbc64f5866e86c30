"""The central directory of a zip: what it holds and where, read once over ranges and kept on disk.

`zipfile` reads it; what it believes and we do not (a size, a place, members that lie in one another) is checked here
and in `zip_members`, before and after a member's bytes come.
"""

import gc
import os
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from vlmflow.core.files import whole_file
from vlmflow.web.missing import Refused

Read = Callable[[int, int], bytes]
"""Gives the bytes of an archive from a place up to another."""

TAIL_BYTES = (1 << 16) + 100
"""The records of the end, zip64's among them, with the longest comment."""

LARGEST_DIRECTORY = 1 << 26
"""Bytes: that of 118,287 pictures takes 9 MB; a larger one is a broken record, or hostile. What is made of it takes
twelve times as much memory."""

LOCAL_HEADER = 30
LONGEST_NAMES = 2 * 0xFFFF
"""Bytes before a member's name; and of its name and extra field, which may differ from the directory's."""


class Member(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A member of a zip.

    start, end: the bytes of the archive in which its local header and content lie, nothing else's.
    packed, size: bytes of its content, packed and unpacked. crc: CRC-32 of the unpacked content.
    method: 0 stored, 8 deflated. flags: the format's general purpose bits; bit 0 is encryption.
    """

    start: int
    end: int
    packed: int
    size: int
    crc: int
    method: int
    flags: int


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


def read_members(read: Read, size: int) -> dict[str, Member]:
    """Read the central directory; of two members with one name the last counts, as for every unzip.

    size: bytes of the archive. Raises Refused where it is no zip, or broken; whatever `read` raises.
    """
    gc.disable()  # it would look through 100,000 members again and again
    try:
        archive = zipfile.ZipFile(_Archive(read, size))
        return _members(archive.infolist(), archive.start_dir)
    except (zipfile.BadZipFile, NotImplementedError, struct.error, ValueError) as error:
        raise Refused("unreadable", f"no zip, or its central directory is broken: {error}") from None
    finally:
        gc.enable()


class _Archive:
    """An archive as the file that `zipfile` wants; its end, where that looks several times, is read once."""

    def __init__(self, read: Read, size: int) -> None:
        self._read = read
        self._size = size
        self._place = 0
        self._tail_start = max(0, size - TAIL_BYTES)
        self._tail = read(self._tail_start, size) if size else b""

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        place = offset + (self._size if whence == os.SEEK_END else 0)
        if place < 0:
            raise OSError("before the archive's first byte")
        self._place = place
        return place

    def read(self, count: int = -1) -> bytes:
        if count > LARGEST_DIRECTORY:
            raise ValueError(f"it claims {count:,} bytes")
        start, end = self._place, self._size if count < 0 else min(self._size, self._place + count)
        self._place = max(start, end)
        before = self._read(start, min(end, self._tail_start)) if start < min(end, self._tail_start) else b""
        return before + self._tail[max(0, start - self._tail_start) : max(0, end - self._tail_start)]


def _members(infos: list[zipfile.ZipInfo], directory_start: int) -> dict[str, Member]:
    """Give the members but for folders, each up to where the next one of any kind begins."""
    starts = sorted({info.header_offset for info in infos})
    next_starts = dict(zip(starts, [*starts[1:], directory_start], strict=False))
    members = {}
    for info in infos:
        if not info.filename.endswith("/"):  # is_dir fails for a name without letters
            start, packed = info.header_offset, info.compress_size
            longest = start + LOCAL_HEADER + LONGEST_NAMES + packed
            end = min(next_starts[start], directory_start, longest)
            members[info.filename] = Member(
                start, end, packed, info.file_size, info.CRC, info.compress_type, info.flag_bits
            )
    return members
