"""Reaching a path on a volume that jobs write to, without following a link that a job may have planted there.

The controller has on its other mounts what no job may see or change: its token, and what it executes. A link on the
shared volume could lead there. So every folder on the way is opened in the one before it, and a link is refused; what
is then done below the open folder cannot be led elsewhere, whatever is renamed meanwhile. Linux alone: /proc.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from vlmflow.core.errors import VlmflowError

FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""O_NONBLOCK: opening a named pipe would wait for ever."""


@contextmanager
def opened(folder: Path, make: bool = False) -> Iterator[int]:
    """Give a descriptor of a folder for the time of the block, for calls that take a `dir_fd`.

    make: whether it, and folders above it, are made where they are missing.

    Raises VlmflowError where a link or a file has the name of a folder on the way, OSError where it cannot be opened.
    """
    place = Path("/")
    descriptor = os.open(place, FOLDER)
    try:
        for name in folder.absolute().parts[1:]:
            place /= name
            inner = _inner(descriptor, place, make)
            os.close(descriptor)
            descriptor = inner
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def reached(place: Path, make: bool = False) -> Iterator[Path]:
    """Give another path to a file or folder, for the time of the block; it leads there whatever is renamed on the way.

    The last name itself may be a link: who gets the path does not follow it.

    make: whether the folders above it are made where they are missing.

    Raises as `opened`; an OSError of the block names `place`.
    """
    with opened(place.parent, make) as folder:
        try:
            yield Path("/proc/self/fd", str(folder), place.name)
        except OSError as error:
            if error.filename is not None:
                error.filename, error.filename2 = str(place), None
            raise


def read_end(file: Path, limit: int) -> bytes:
    """Give the last bytes of a file, at most `limit`.

    Raises VlmflowError where it, or a folder on the way, is a link or no file; OSError where it cannot be read.
    """
    with opened(file.parent) as folder:
        try:
            descriptor = os.open(file.name, FILE, dir_fd=folder)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):
                raise _planted(file) from None
            raise
    with open(descriptor, "rb") as stream:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise _planted(file)
        stream.seek(max(0, found.st_size - limit))
        return stream.read(limit)


def _inner(descriptor: int, place: Path, make: bool) -> int:
    try:
        try:
            return os.open(place.name, FOLDER, dir_fd=descriptor)
        except FileNotFoundError:
            if not make:
                raise
        with suppress(FileExistsError):  # made by another at the same moment
            os.mkdir(place.name, dir_fd=descriptor)
        return os.open(place.name, FOLDER, dir_fd=descriptor)
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            raise _planted(place) from None
        error.filename = str(place)
        raise


def _planted(place: Path) -> VlmflowError:
    return VlmflowError(
        f"{place} is a link or not the expected kind of file: a job may have put it there, so it is not followed",
        f"check where it leads (ls -l {place}) and which job made it; remove it and run the same command again",
    )
