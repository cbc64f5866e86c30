"""Reads the central directory of a zip once over ranges, and keeps it on disk.

`zipfile` parses it. This module and `zip_members` check what `zipfile` trusts (sizes, offsets, overlapping members),
before and after a member's bytes are read.

Members of a zip: the byte ranges of the wanted ones, and their checked content.
"""

import gc
import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import msgspec

from vlmflow.core.files import whole_file
from vlmflow.fetch.packed_files import Content
from vlmflow.fetch.transport import Refused

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


WASTE = 0.01
"""Unwanted bytes between members that may also be read, as a share of the wanted ones: 5 % are allowed in total, and
the directory may need most of them."""

LARGEST_GAP = 1 << 20
"""The largest gap that is read rather than split into two requests: 100 ms of latency at 10 MB/s per connection."""

LARGEST_RANGE = 4 << 20
"""The most bytes of a request, unless a single member is larger: it limits memory, and the loss after a break."""

LOCAL_SIGNATURE = b"PK\x03\x04"
STORED, DEFLATED = 0, 8
ENCRYPTED = 1


class Range(msgspec.Struct):
    """Bytes of an archive, from `start` up to `end`, and the names of the wanted members in them."""

    start: int
    end: int
    names: list[str]


def refuse_unreadable(member: Member, max_bytes: int) -> None:
    """Raise Refused for an invalid or too large member, before a byte of it is read."""
    if member.flags & ENCRYPTED or member.method not in (STORED, DEFLATED):
        raise Refused("unreadable", f"encrypted, or packed by method {member.method}")
    if max(member.size, member.packed) > max_bytes:
        raise Refused("too_large", f"{max(member.size, member.packed):,} bytes, the limit is {max_bytes:,}")
    if member.start < 0 or member.start + LOCAL_HEADER + member.packed > member.end:
        raise Refused("damaged", "the directory places it outside of the archive, or over the next member")


def ranges_of(members: dict[str, Member]) -> list[Range]:
    """Return the ranges with some members; neighbours, also across small gaps, share a range.

    The smallest gaps are closed first, as long as all of them together waste at most WASTE.
    """
    in_order = sorted(members.items(), key=lambda item: item[1].start)
    ends = [0]
    for _, member in in_order:
        ends.append(max(ends[-1], member.end))
    gaps = (member.start - end for (_, member), end in zip(in_order, ends, strict=False))
    largest = _largest_gap(gaps, WASTE * sum(member.end - member.start for member in members.values()))
    ranges: list[Range] = []
    for name, member in in_order:
        last = ranges[-1] if ranges else None
        if last and member.start - last.end <= largest and member.end - last.start <= LARGEST_RANGE:
            last.end = max(last.end, member.end)
            last.names.append(name)
        else:
            ranges.append(Range(member.start, member.end, [name]))
    return ranges


def _largest_gap(gaps: Iterable[int], budget: float) -> int:
    """Return the largest gap to close: all gaps up to it fit into the budget together."""
    largest, sum_so_far = 0, 0
    for gap in sorted(gap for gap in gaps if 0 < gap <= LARGEST_GAP):
        sum_so_far += gap
        if sum_so_far > budget:
            return min(largest, gap - 1)
        largest = gap
    return largest


def content_of(packed: memoryview, member: Member) -> Content:
    """Return a member's content from its bytes in the archive (`member.start` to `member.end`).

    Sizes and CRC come from the directory; data descriptors and the local header's values are ignored. Unpacking stops
    as soon as the content exceeds its size.

    Raises Refused if content and directory differ.
    """
    if packed[:4] != LOCAL_SIGNATURE or len(packed) < LOCAL_HEADER:
        raise Refused("damaged", "no member begins at the offset in the directory")
    name_length, extra_length = struct.unpack_from("<HH", packed, 26)
    start = LOCAL_HEADER + name_length + extra_length
    content: Content = packed[start : start + member.packed]
    if len(content) < member.packed:
        raise Refused("damaged", "it overlaps the next member")
    if member.method == DEFLATED:
        inflate = zlib.decompressobj(-zlib.MAX_WBITS)
        try:
            content = inflate.decompress(content, member.size + 1)
        except zlib.error as error:
            raise Refused("damaged", str(error)) from None
    if len(content) != member.size:
        raise Refused("damaged", f"its unpacked size differs from the {member.size:,} bytes in the directory")
    if zlib.crc32(content) != member.crc:
        raise Refused("damaged", "its CRC differs from the directory's")
    return content
