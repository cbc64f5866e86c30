"""Members of a zip: the byte ranges of the wanted ones, and their checked content."""

import struct
import zlib
from collections.abc import Iterable

import msgspec

from vlmflow.archives.picture_file import Content
from vlmflow.archives.zip_directory import LOCAL_HEADER, Member
from vlmflow.web.missing import Refused

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
