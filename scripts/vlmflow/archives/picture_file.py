"""A fetched picture written to its store: whole or not at all, and on the disk when it has its name."""

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
"""A picture's bytes, or where they lie within those of its archive."""

_own = threading.local()


def write_picture(file: Path, content: Content) -> Missing | None:
    """Write a picture, whole or not at all, synced to the disk; gives why it cannot have its name.

    Who calls this has the picture's source to itself: `whole_file`'s lock and buffer would cost more than the writing.
    Raises OSError where the disk fails.
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
        return Missing("name_conflict", f"{file.name!r} would lie below a file, or where a folder lies")
    except OSError as error:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        error.filename = error.filename or str(file)
        raise
    return None


def _write(part: Path, content: Content) -> None:
    """Write to the disk past the page cache, where the file system lets us: what is synced at once gains nothing there.

    Finding pages for it took as long as all else that is done for a picture (docs/benchmarks.md).
    """
    try:
        _write_through(part, content, os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:  # open(2): what a file system that cannot do it says, be it later
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
    """Give this thread's buffer, which begins with a page: only from there a disk takes bytes itself."""
    if not hasattr(_own, "pages"):
        _own.pages = memoryview(mmap.mmap(-1, BUFFER_BYTES))
    pages: memoryview = _own.pages
    return pages
