"""The members of a zip: which bytes hold those that are wanted, and their content, checked."""

import struct
import zlib
from collections.abc import Iterable

import msgspec

from vlmflow.archives.picture_file import Content
from vlmflow.archives.zip_directory import LOCAL_HEADER, Member
from vlmflow.web.missing import Refused

WASTE = 0.01
"""Bytes between wanted members that may be read along, as a share of those that are wanted: of the 5 % that are
allowed in all, the directory may need most."""

LARGEST_GAP = 1 << 20
"""A gap is read along where that takes less time than asking anew: 100 ms of latency at 10 MB/s a connection."""

LARGEST_RANGE = 4 << 20
"""Bytes asked for at once, unless a single member is larger: what a break costs in memory and in waiting."""

LOCAL_SIGNATURE = b"PK\x03\x04"
STORED, DEFLATED = 0, 8
ENCRYPTED = 1


class Range(msgspec.Struct):
    """Bytes of an archive, from `start` up to `end`, and the names of the wanted members in them."""

    start: int
    end: int
    names: list[str]


def refuse_unreadable(member: Member, max_bytes: int) -> None:
    """Raise Refused for a member that cannot be right, or is too large, before a byte of it is read."""
    if member.flags & ENCRYPTED or member.method not in (STORED, DEFLATED):
        raise Refused("unreadable", f"encrypted, or packed by method {member.method}")
    if max(member.size, member.packed) > max_bytes:
        raise Refused("too_large", f"{max(member.size, member.packed):,} bytes, the limit is {max_bytes:,}")
    if member.start < 0 or member.start + LOCAL_HEADER + member.packed > member.end:
        raise Refused("damaged", "the directory places it outside the archive, or over the next member")


def ranges_of(members: dict[str, Member]) -> list[Range]:
    """Give the ranges that hold some members, neighbours and those across small gaps in one.

    The smallest gaps are closed first, as long as all together waste no more than WASTE.
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
    """Give the largest gap that may be closed: all that are no larger fit into the budget together."""
    largest, sum_so_far = 0, 0
    for gap in sorted(gap for gap in gaps if 0 < gap <= LARGEST_GAP):
        sum_so_far += gap
        if sum_so_far > budget:
            return min(largest, gap - 1)
        largest = gap
    return largest


def content_of(packed: memoryview, member: Member) -> Content:
    """Give a member's content from its bytes in the archive (`member.start` to `member.end`).

    Sizes and CRC are the directory's: data descriptors behind the content and what the local header claims count
    for nothing. A content that unpacks to more than its size is not unpacked further.

    Raises Refused where they do not fit.
    """
    if packed[:4] != LOCAL_SIGNATURE or len(packed) < LOCAL_HEADER:
        raise Refused("damaged", "no member begins where the directory says")
    name_length, extra_length = struct.unpack_from("<HH", packed, 26)
    start = LOCAL_HEADER + name_length + extra_length
    content: Content = packed[start : start + member.packed]
    if len(content) < member.packed:
        raise Refused("damaged", "it runs into the next member")
    if member.method == DEFLATED:
        inflate = zlib.decompressobj(-zlib.MAX_WBITS)
        try:
            content = inflate.decompress(content, member.size + 1)
        except zlib.error as error:
            raise Refused("damaged", str(error)) from None
    if len(content) != member.size:
        raise Refused("damaged", f"it unpacks to more or less than the {member.size:,} bytes of the directory")
    if zlib.crc32(content) != member.crc:
        raise Refused("damaged", "its CRC is not the directory's")
    return content
