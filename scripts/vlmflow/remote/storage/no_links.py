"""Opens a path on a volume that jobs write to, without following links, which a job may have planted.

The controller's other mounts hold what no job may see or change: its token, and what it executes. A link on the shared
volume could lead there. So each folder of a path is opened relative to the one before it, and a link is refused. Calls
relative to the open folder cannot be redirected, whatever is renamed meanwhile. Linux only: it uses /proc.
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
"""O_NONBLOCK: opening a named pipe would block forever."""


@contextmanager
def opened(folder: Path, make: bool = False) -> Iterator[int]:
    """Yield a descriptor of a folder during the block, for calls that take a `dir_fd`.

    make: whether to make it, and folders above it, if they are missing.

    Raises VlmflowError if a folder on the path is a link or a file, OSError if it cannot be opened.
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
    """Yield another path to a file or folder during the block; it leads there whatever folder above is renamed.

    The last name itself may be a link: the caller must not follow it.

    make: whether to make the folders above it if they are missing.

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
    """Return the last bytes of a file, at most `limit`.

    Raises VlmflowError if it is a link or no regular file, or if its path has a link; OSError if it cannot be read.
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
        with suppress(FileExistsError):  # another process made it at the same moment
            os.mkdir(place.name, dir_fd=descriptor)
        return os.open(place.name, FOLDER, dir_fd=descriptor)
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            raise _planted(place) from None
        error.filename = str(place)
        raise


def _planted(place: Path) -> VlmflowError:
    return VlmflowError(
        f"{place} is a link or not the expected kind of file; it is not followed, because a job may have made it",
        f"check where it leads (ls -l {place}) and which job made it; remove it and run the same command again",
    )
