"""Writes a fetched picture to its store: complete or not at all, and synced to disk before it gets its name."""

import errno
import mmap
import os
import threading
from contextlib import suppress
from pathlib import Path

from vlmflow.core.files import unfinished
from vlmflow.web.missing import Missing

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
