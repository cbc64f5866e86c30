"""Writes a fetched picture to its store: complete or not at all, and synced to disk before it gets its name.

Extracts pictures from tar and parquet files on this disk, which it reads once from the first byte to the last.
"""

import errno
import io
import mmap
import os
import tarfile
import threading
from collections.abc import Iterator, Set
from contextlib import suppress
from pathlib import Path

from vlmflow.core.files import unfinished
from vlmflow.fetch.transport import Missing, Refused

WRITE_ANEW = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
BUFFER_BYTES = 1 << 20

Content = bytes | memoryview
"""A picture's bytes, or a view of them in its archive's bytes."""

_own = threading.local()


def write_picture(file: Path, content: Content) -> Missing | None:
    """Write a picture completely or not at all, synced to disk; returns why it cannot have its name, or None.

    The caller must have locked the picture's source: `whole_file`'s own lock and buffer would cost more than the write.
    Raises OSError if the disk fails.
    """
    part = unfinished(file)
    try:
        try:
            _write(part, content)
        except FileNotFoundError:
            file.parent.mkdir(parents=True, exist_ok=True)
            _write(part, content)
        part.rename(file)
    except (NotADirectoryError, FileExistsError, IsADirectoryError):
        with suppress(NotADirectoryError):
            part.unlink(missing_ok=True)
        return Missing("name_conflict", f"{file.name!r} would be below a file, or has the name of a folder")
    except OSError as error:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        error.filename = error.filename or str(file)
        raise
    return None


def _write(part: Path, content: Content) -> None:
    """Write to disk without the page cache, if the file system allows it: a file that is synced at once does not gain.

    Allocating its pages took as long as all other work on a picture (docs/benchmarks.md).
    """
    try:
        _write_through(part, content, os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:  # open(2): a file system without O_DIRECT, even if it says so later
            raise
        _write_through(part, content, 0)


def _write_through(part: Path, content: Content, direct: int) -> None:
    descriptor = os.open(part, WRITE_ANEW | direct, 0o666)
    try:
        buffer = _pages()
        for start in range(0, len(content), len(buffer)):
            block = content[start : start + len(buffer)]
            buffer[: len(block)] = block
            rest = buffer[: -(-len(block) // mmap.PAGESIZE) * mmap.PAGESIZE]
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        os.ftruncate(descriptor, len(content))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _pages() -> memoryview:
    """Return this thread's buffer, aligned to a page as O_DIRECT requires."""
    if not hasattr(_own, "pages"):
        _own.pages = memoryview(mmap.mmap(-1, BUFFER_BYTES))
    pages: memoryview = _own.pages
    return pages


NamedContent = tuple[str, bytes | Missing]

ROWS_AT_A_TIME = 16

LARGEST_HEADER = 1 << 20
"""The most bytes of a header that extends another one (a long name, pax records): tarfile reads it at once, whatever
size it claims."""

READS_AT_THE_END = 1_000
"""How often tarfile may read at an archive's end; for each decompressed block it may do so once."""

EXTENDED = {
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
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
            raise tarfile.ReadError("a sparse file")
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
        with (
            ArchiveWithAnEnd(archive) as file,
            tarfile.open(fileobj=file, mode="r|*", tarinfo=BoundedHeader) as files,
        ):
            for entry in files:
                files.members.clear()  # type: ignore[attr-defined]  # it would keep them all; typeshed leaves it out
                name = entry.name.removeprefix("./")
                if name not in wanted or not entry.isreg():
                    continue
                if entry.size > max_bytes:
                    yield name, Missing("too_large", f"{entry.size:,} bytes, the limit is {max_bytes:,}")
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
                    if not isinstance(name, str) or name not in wanted or not isinstance(content, bytes):
                        continue
                    too_large = len(content) > max_bytes
                    limit = Missing("too_large", f"{len(content):,} bytes, the limit is {max_bytes:,}")
                    yield name, limit if too_large else content
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        if getattr(error, "errno", None) is not None:
            raise
        raise Refused("unreadable", f"not a parquet file, or damaged: {' '.join(str(error).split())[:200]}") from None
