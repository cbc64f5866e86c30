"""Pictures out of archives: of a zip by ranges of its bytes, of a tar or a parquet file from its first to its last.

`zipfile`, `tarfile` and pyarrow parse them. What these trust is checked here, before and after a picture's bytes are
read: sizes, offsets, members that overlap, headers that claim too much.
"""

import gc
import io
import os
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Set
from contextlib import suppress
from pathlib import Path

import msgspec

from vlmflow.core.files import whole_file
from vlmflow.fetch.transport import Missing, Refused

Read = Callable[[int, int], bytes]
"""Returns the bytes of an archive from a start up to an end (exclusive)."""

Content = bytes | memoryview
"""A picture's bytes, or a view of them in its archive's bytes."""

TAIL_BYTES = (1 << 16) + 100
"""The records at a zip's end, with zip64's and the longest comment."""

LARGEST_DIRECTORY = 1 << 26
"""The most bytes of a zip's directory: 118,287 pictures take 9 MB, so a larger one is damaged or hostile. Parsed, it
takes twelve times as much memory."""

LOCAL_HEADER, LOCAL_SIGNATURE = 30, b"PK\x03\x04"
LONGEST_NAMES = 2 * 0xFFFF
"""Bytes before a member's name; the most of its name and extra field, which may differ from the directory's."""

ENCRYPTED = 1

WASTE = 0.01
"""Unwanted bytes between members that may also be read, as a share of the wanted ones: 5 % are allowed in total, and
the directory may need most of them."""

LARGEST_GAP = 1 << 20
"""The largest gap that is read rather than split into two requests: 100 ms of latency at 10 MB/s per connection."""

LARGEST_RANGE = 4 << 20
"""The most bytes of a request, unless a single member is larger: it limits memory, and the loss after a break."""


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
    """The members of a zip by name, as they are kept on disk. key: the archive and its version."""

    key: str
    members: dict[str, Member]


def kept_members(kept: Path, key: str, read: Read, size: int) -> dict[str, Member]:
    """Return `read_members` of an archive, from the file `kept` if that has the same `key`; else read and save them."""
    with suppress(OSError, ValueError, RecursionError):  # missing or damaged
        directory = msgspec.json.decode(kept.read_bytes(), type=Directory)
        if directory.key == key:
            return directory.members
    members = read_members(read, size)
    with whole_file(kept) as file:
        file.write(msgspec.json.encode(Directory(key, members)))
    return members


def read_members(read: Read, size: int) -> dict[str, Member]:
    """Read a zip's central directory; of two members with one name the last counts, as in every unzip tool.

    size: bytes of the archive. Raises Refused if it is not a zip, or damaged; whatever `read` raises.
    """
    gc.disable()  # it would traverse 100,000 members again and again
    try:
        archive = zipfile.ZipFile(_SeekableArchive(read, size))
        return _members(archive.infolist(), archive.start_dir)
    except (zipfile.BadZipFile, NotImplementedError, struct.error, ValueError) as error:
        raise Refused("unreadable", f"not a zip file, or its central directory is damaged: {error}") from None
    finally:
        gc.enable()


class _SeekableArchive:
    """An archive as a file for `zipfile`; its end, which `zipfile` reads several times, is read once."""

    def __init__(self, read: Read, size: int) -> None:
        self._read = read
        self._size = size
        self._position = 0
        self._tail_start = max(0, size - TAIL_BYTES)
        self._tail = read(self._tail_start, size) if size else b""

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        position = offset + (self._size if whence == os.SEEK_END else 0)
        if position < 0:
            raise OSError("the position is before the archive's first byte")
        self._position = position
        return position

    def read(self, count: int = -1) -> bytes:
        if count > LARGEST_DIRECTORY:
            raise ValueError(f"it claims to have {count:,} bytes")
        start, end = self._position, self._size if count < 0 else min(self._size, self._position + count)
        self._position = max(start, end)
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
            sizes = (packed, info.file_size, info.CRC)
            members[info.filename] = Member(start, end, *sizes, info.compress_type, info.flag_bits)
    return members


def refuse_unreadable(member: Member, max_bytes: int) -> None:
    """Raise Refused for an invalid or too large member, before a byte of it is read."""
    if member.flags & ENCRYPTED or member.method not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise Refused("unreadable", f"encrypted, or packed by method {member.method}")
    if max(member.size, member.packed) > max_bytes:
        raise Refused("too_large", f"{max(member.size, member.packed):,} bytes, the limit is {max_bytes:,}")
    if member.start < 0 or member.start + LOCAL_HEADER + member.packed > member.end:
        raise Refused("damaged", "the directory places it outside of the archive, or over the next member")


class Range(msgspec.Struct):
    """Bytes of an archive, from `start` up to `end`, and the names of the wanted members in them."""

    start: int
    end: int
    names: list[str]


def ranges_of(members: dict[str, Member]) -> list[Range]:
    """Return the ranges with some members; neighbours, also across small gaps, share a range.

    The smallest gaps are closed first, as long as all of them together waste at most WASTE.
    """
    in_order = sorted(members.items(), key=lambda item: item[1].start)
    ends = [0]
    for _, member in in_order:
        ends.append(max(ends[-1], member.end))
    gaps = [member.start - end for (_, member), end in zip(in_order, ends, strict=False)]
    largest, waste, budget = 0, 0, WASTE * sum(member.end - member.start for member in members.values())
    for gap in sorted(gap for gap in gaps if 0 < gap <= LARGEST_GAP):
        waste += gap
        if waste > budget:
            largest = min(largest, gap - 1)  # all gaps of one size are closed, or none
            break
        largest = gap
    ranges: list[Range] = []
    for name, member in in_order:
        last = ranges[-1] if ranges else None
        if last and member.start - last.end <= largest and member.end - last.start <= LARGEST_RANGE:
            last.end = max(last.end, member.end)
            last.names.append(name)
        else:
            ranges.append(Range(member.start, member.end, [name]))
    return ranges


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
    if member.method == zipfile.ZIP_DEFLATED:
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


NamedContent = tuple[str, bytes | Missing]

LARGEST_HEADER = 1 << 20
"""The most bytes of a tar's header that extends another one (a long name, pax records): tarfile reads it at once,
whatever size it claims."""

READS_AT_THE_END = 1_000
"""How often tarfile may read at an archive's end; for each decompressed block it may do so once."""

EXTENDED = {
    *(tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE),
    *(tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK),
}


class BoundedHeader(tarfile.TarInfo):
    """A tar's header with a limit on its memory, and without sparse files, which no picture needs.

    Raises tarfile.ReadError for a header beyond that.
    """

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        """Read what follows this header, by its type: tarfile's own hook for subclasses."""
        if self.type in EXTENDED and self.size > LARGEST_HEADER:
            raise tarfile.ReadError(f"a header of {self.size:,} bytes")
        if self.type == tarfile.GNUTYPE_SPARSE:
            self._proc_gnusparse_10()
        read: tarfile.TarInfo = super()._proc_member(archive)  # type: ignore[misc]  # typeshed leaves it out
        return read

    def _proc_gnusparse_10(self, *_: object) -> None:
        raise tarfile.ReadError("a sparse file")


class ArchiveWithAnEnd(io.FileIO):
    """A file for tarfile, which reads on at its end, block by block, as long as a header claims that there is more."""

    ends = 0

    def read(self, size: int | None = -1, /) -> bytes:
        """Read as any file; raises tarfile.ReadError at the end, if asked there too often."""
        content: bytes = super().read(size)
        self.ends += not content
        if self.ends > READS_AT_THE_END:
            raise tarfile.ReadError("unexpected end of data")
        return content


def tar_members(archive: Path, wanted: Set[str], max_bytes: int) -> Iterator[NamedContent]:
    """Yield name and content of the wanted regular files in a tar, compressed or not, in their order.

    Raises Refused if it is not a tar, or damaged.
    """
    try:
        with ArchiveWithAnEnd(archive) as file, tarfile.open(fileobj=file, mode="r|*", tarinfo=BoundedHeader) as files:
            for entry in files:
                files.members.clear()  # type: ignore[attr-defined]  # it would keep them all; typeshed leaves it out
                name = entry.name.removeprefix("./")
                if name not in wanted or not entry.isreg():
                    continue
                if entry.size > max_bytes:
                    yield name, _too_large(entry.size, max_bytes)
                    continue
                opened = files.extractfile(entry)
                assert opened is not None, "it is a regular file"
                content = opened.read()
                whole = len(content) == entry.size
                yield name, content if whole else Missing("damaged", "the file is truncated")
    except (tarfile.TarError, EOFError, OSError, ValueError, RecursionError) as error:
        if getattr(error, "errno", None) is not None:
            raise
        raise Refused("unreadable", f"not a tar file, or damaged: {error}") from None


ROWS_AT_A_TIME = 16


def parquet_members(
    table: Path, wanted: Set[str], max_bytes: int, picture_column: str, name_column: str | None
) -> Iterator[NamedContent]:
    """Yield name and content of the wanted pictures of a parquet file, reading a few rows at a time.

    picture_column: the column with the bytes, or with a struct of `bytes` and `path`, as in data sets on the hub.
    name_column: the column with their names; None uses the struct's `path`.

    Raises Refused if it is not a parquet file, is damaged, or lacks these columns.
    """
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(table) as file:
            columns = [picture_column, *([name_column] if name_column else [])]
            if lacking := set(columns) - set(file.schema_arrow.names):
                names = ", ".join(file.schema_arrow.names)
                raise Refused("unreadable", f"no column {', '.join(lacking)}; the file has {names}")
            for batch in file.iter_batches(ROWS_AT_A_TIME, columns=columns):
                for row in batch.to_pylist():
                    picture = row[picture_column]
                    picture = picture if isinstance(picture, dict) else {"bytes": picture}
                    name = row[name_column] if name_column else picture.get("path")
                    content = picture.get("bytes")
                    if isinstance(name, str) and name in wanted and isinstance(content, bytes):
                        size = len(content)
                        yield name, content if size <= max_bytes else _too_large(size, max_bytes)
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        if getattr(error, "errno", None) is not None:
            raise
        raise Refused("unreadable", f"not a parquet file, or damaged: {' '.join(str(error).split())[:200]}") from None


def _too_large(size: int, max_bytes: int) -> Missing:
    return Missing("too_large", f"{size:,} bytes, the limit is {max_bytes:,}")
