"""Reads the central directory of a zip once over ranges, and keeps it on disk.

`zipfile` parses it. This module and `zip_members` check what `zipfile` trusts (sizes, offsets, overlapping members),
before and after a member's bytes are read.
"""

import gc
import os
import struct
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from vlmflow.core.files import whole_file
from vlmflow.web.missing import Refused

Read = Callable[[int, int], bytes]
"""Returns the bytes of an archive from a start up to an end (exclusive)."""

TAIL_BYTES = (1 << 16) + 100
"""The records at the end, with zip64's and the longest comment."""

LARGEST_DIRECTORY = 1 << 26
"""The most bytes of a directory: 118,287 pictures take 9 MB, so a larger one is damaged or hostile. Parsed, it takes
twelve times as much memory."""

LOCAL_HEADER = 30
LONGEST_NAMES = 2 * 0xFFFF
"""Bytes before a member's name; the most of its name and extra field, which may differ from the directory's."""


class Member(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A member of a zip.

    start, end: the range of the archive with its local header and content, before the next member.
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
    """The members of a zip by name.

    key: the archive and its version.
    """

    key: str
    members: dict[str, Member]


def kept_directory(kept: Path, key: str, read: Read, size: int) -> Directory:
    """Return the directory of an archive, from the file `kept` if that has the same `key`; else read it and save it.

    size: bytes of the archive. Raises Refused if it is not a zip, or damaged; whatever `read` raises.
    """
    with suppress(OSError, ValueError, RecursionError):  # missing or damaged
        found = msgspec.json.decode(kept.read_bytes(), type=Directory)
        if found.key == key:
            return found
    directory = Directory(key, read_members(read, size))
    with whole_file(kept) as file:
        file.write(msgspec.json.encode(directory))
    return directory


def read_members(read: Read, size: int) -> dict[str, Member]:
    """Read the central directory; of two members with one name the last counts, as in every unzip tool.

    size: bytes of the archive. Raises Refused if it is not a zip, or damaged; whatever `read` raises.
    """
    gc.disable()  # it would traverse 100,000 members again and again
    try:
        archive = zipfile.ZipFile(_Archive(read, size))
        return _members(archive.infolist(), archive.start_dir)
    except (zipfile.BadZipFile, NotImplementedError, struct.error, ValueError) as error:
        raise Refused("unreadable", f"not a zip file, or its central directory is damaged: {error}") from None
    finally:
        gc.enable()


class _Archive:
    """An archive as a file for `zipfile`; its end, which `zipfile` reads several times, is read once."""

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
            raise OSError("the position is before the archive's first byte")
        self._place = place
        return place

    def read(self, count: int = -1) -> bytes:
        if count > LARGEST_DIRECTORY:
            raise ValueError(f"it claims to have {count:,} bytes")
        start, end = self._place, self._size if count < 0 else min(self._size, self._place + count)
        self._place = max(start, end)
        before = self._read(start, min(end, self._tail_start)) if start < min(end, self._tail_start) else b""
        return before + self._tail[max(0, start - self._tail_start) : max(0, end - self._tail_start)]


def _members(infos: list[zipfile.ZipInfo], directory_start: int) -> dict[str, Member]:
    """Return the members without folders; each ends at the latest where the next one of any kind begins."""
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
