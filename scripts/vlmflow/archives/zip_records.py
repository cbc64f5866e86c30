"""The records at the end of a zip that say what it holds and where: APPNOTE.TXT, 4.3.12 to 4.3.16 and 4.5.3.

Our own reader, which takes half of `zipfile`'s time: all members are read before a byte of any picture comes.
tests/unit/archives/test_zip_records.py holds the two against each other.
"""

import gc
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from vlmflow.web.missing import Refused

Read = Callable[[int, int], bytes]
"""Gives the bytes of an archive from a place up to another."""

END = struct.Struct("<4s8xIIH")
"""The last record: its signature, size and place of the directory, length of the comment behind it."""

LOCATOR_64 = struct.Struct("<4s4xQI")
END_64 = struct.Struct("<4s36xQQ")
"""Zip64's record of the end, with size and place of the directory, and its locator, with the record's place and the
number of files that the archive was split into; both lie before the last record."""

ENTRY = struct.Struct("<4s4xHH4xIIIHHH8xI")
"""A member: signature, flags, method, CRC, packed and unpacked size, lengths of name, extra and comment, place."""

TAIL_BYTES = END_64.size + LOCATOR_64.size + END.size + 0xFFFF
"""The records of the end, with the longest comment."""

LARGEST_DIRECTORY = 1 << 27
"""Bytes: that of 118,287 pictures takes 9 MB; a larger one is a broken record, or hostile. What is made of it takes
eight times as much memory."""

LOCAL_HEADER = 30
LONGEST_NAMES = 2 * 0xFFFF
"""Bytes before a member's name; and of its name and extra field, which may differ from the directory's."""

IS_UTF8 = 0x800
"""The flag of a name in UTF-8; others are in code page 437."""

ELSEWHERE = 0xFFFFFFFF
"""What stands for a number that does not fit, and is in zip64's extra field."""

EXTRA = struct.Struct("<HH")
ZIP64 = 1
"""Id and length of what stands in an extra field, and the id of zip64's."""


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


class _Place(NamedTuple):
    """Where the directory lies, and how many bytes come before the archive's own first (a program that unpacks it)."""

    start: int
    end: int
    shift: int


_Entry = tuple[str, int, int, int, int, int, int]
"""Name, start, packed, size, crc, method and flags of a member; a tuple, since there are 100,000 of them."""


def read_members(read: Read, size: int) -> dict[str, Member]:
    """Read the central directory; of two members with one name the last counts, as for every unzip.

    size: bytes of the archive. Raises Refused where it is no zip, or broken; whatever `read` raises.
    """
    tail_start = max(0, size - TAIL_BYTES)
    tail = read(tail_start, size) if size else b""
    gc.disable()  # it would look through 100,000 members again and again
    try:
        place = _find_directory(tail, tail_start)
        content = read(place.start, min(place.end, tail_start)) if place.start < tail_start else b""
        content += tail[max(0, place.start - tail_start) : max(0, place.end - tail_start)]
        return _members(_entries(content, place.shift), place.start)
    except (struct.error, ValueError) as error:
        raise Refused("unreadable", f"no zip, or its central directory is broken: {error}") from None
    finally:
        gc.enable()


def _find_directory(tail: bytes, tail_start: int) -> _Place:
    """Find the directory from the archive's last bytes. Raises ValueError, struct.error."""
    place = _place_of_end(tail)
    _, size, start, _ = END.unpack_from(tail, place)
    before = place - LOCATOR_64.size
    if before >= 0 and tail.startswith(b"PK\6\7", before):
        _, told, files = LOCATOR_64.unpack_from(tail, before)
        if files > 1:
            raise ValueError(f"the archive is split into {files:,} files")
        # Before the locator, where nothing stands between them: what comes before the archive is not in its places.
        places = (told - tail_start, before - END_64.size)
        place = next((one for one in places if one >= 0 and tail.startswith(b"PK\6\6", one, before)), None)
        if place is None:
            raise ValueError("there is no record before zip64's locator")
        _, size, start = END_64.unpack_from(tail, place)
    end = tail_start + place
    if size > LARGEST_DIRECTORY:
        raise ValueError(f"it claims {size:,} bytes")
    if not 0 <= start <= end - size:
        raise ValueError("it points outside of the archive")
    return _Place(end - size, end, end - size - start)


def _place_of_end(tail: bytes) -> int:
    """Find the last record: the last one whose comment ends with the archive, or else simply the last.

    A comment may hold a record's signature, and an archive that is stored in this one has a record of its own; but
    some archives have bytes behind them, or a comment that is cut.
    """
    last = place = tail.rfind(b"PK\5\6", 0, max(0, len(tail) - END.size) + 4)
    while place >= 0:
        *_, comment = END.unpack_from(tail, place)
        if place + END.size + comment == len(tail):
            return place
        place = tail.rfind(b"PK\5\6", 0, place)
    if last < 0:
        raise ValueError("there is no end of a directory")
    return last


def _entries(content: bytes, shift: int) -> list[_Entry]:
    """Read a directory's entries. Raises ValueError, struct.error."""
    entries = []
    place, end = 0, len(content)
    while place < end:
        signature, flags, method, crc, packed, size, name_bytes, extra, comment, start = ENTRY.unpack_from(
            content, place
        )
        if signature != b"PK\1\2":
            raise ValueError(f"no member's entry begins at its byte {place:,}")
        extra_start = place + ENTRY.size + name_bytes
        name = content[place + ENTRY.size : extra_start]
        place = extra_start + extra + comment
        if place > end:
            raise ValueError("its last entry is cut")
        if ELSEWHERE in (size, packed, start):
            size, packed, start = _zip64(content, extra_start, extra_start + extra, size, packed, start)
        is_utf8 = flags & IS_UTF8 or name.isascii()
        text = name.decode("utf-8" if is_utf8 else "cp437")
        entries.append((text, start + shift, packed, size, crc, method, flags))
    return entries


def _zip64(content: bytes, place: int, end: int, *numbers: int) -> Sequence[int]:
    """Give numbers, in zip64's order, with those that stand in the extra field (place to end) taken from there."""
    while place + EXTRA.size <= end:
        kind, length = EXTRA.unpack_from(content, place)
        place += EXTRA.size
        if kind == ZIP64:
            given = list(struct.unpack_from(f"<{min(length, end - place) // 8}Q", content, place))
            if len(given) < numbers.count(ELSEWHERE):
                raise ValueError("zip64's field of a member is cut")
            return [given.pop(0) if number == ELSEWHERE else number for number in numbers]
        place += length
    return numbers


def _members(entries: list[_Entry], directory_start: int) -> dict[str, Member]:
    """Give the members but for folders, each up to where the next one of any kind begins."""
    starts = sorted({entry[1] for entry in entries})
    next_starts = dict(zip(starts, [*starts[1:], directory_start], strict=False))
    members = {}
    for name, start, packed, size, crc, method, flags in entries:
        if not name.endswith("/"):
            longest = start + LOCAL_HEADER + LONGEST_NAMES + packed
            end = min(next_starts[start], directory_start, longest)
            members[name] = Member(start, end, packed, size, crc, method, flags)
    return members
