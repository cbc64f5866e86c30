"""Gives a file or folder its final name. The name leads to a complete version or to none, with any number of writers.

Why this holds, with writers on any machines, killed at any moment:

1. A version is complete and on the disk before it gets the name. Until then it is where no other writer writes: in its
   writer's own folder, or beside the target as `.NAME.TIME-TOKEN.part`.
2. `rename` replaces a free name or a file, `exchange` a folder. Each is one call, done or not done. So after the first
   success the name always leads to one writer's complete version.
3. A writer whom another one overtakes learns it from that call (ENOTEMPTY, ENOENT), which has changed nothing, and
   tries again. A writer returns after its own call succeeded, and does not touch the name again.
4. Before a file or folder is deleted, it is renamed to `.discarded.TIME-TOKEN.gone`, and so is each folder in it before
   it is emptied. Nothing is deleted inside what has the name or will get it: a writer whose folder is taken fails
   (ENOENT).
5. The next writer to a folder deletes what killed writers left there (`part`, `gone`) once the time in its name is a
   day old. If such a writer is still alive after a day, 4 holds.

If names cannot be exchanged (NFS, CephFS, macOS), the older folder is renamed to `.NAME.TIME-TOKEN.old`, and then the
new one to the name. The name is free between the two calls:

6. An `old` is complete, since it had the name. It is deleted by its writer, after this one has taken the name or before
   it makes another `old`; by whoever removes the target; and by any writer once it is a day old and the name is taken.
   So while the name is free after a success, the latest `old` exists, from a writer that is not done yet.
7. `put_back` renames the latest `old` to the name. Every look at a missing target starts with it, and every failing
   writer ends with it. If another version has got the name meanwhile, the call changes nothing: target folders hold
   Snakemake's timestamp and are never empty. A writer whose `old` was put back reports no success. This holds for two
   writers, either of them killed, and any number of readers; with a third writer, killed at the same moment, the name
   may lead to the version before the last, which is complete too.
"""

import ctypes
import errno
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from vlmflow.remote.library import sync

LEFT_AFTER = 24 * 3600
"""Seconds after which unfinished files beside a target count as a killed writer's: no copy takes a day."""

_LEFT = re.compile(r"\.(?P<name>.+)\.(?P<time>[0-9a-f]{16})-[0-9a-f]{12}\.(?P<suffix>part|gone|old)")
_NAME_IS_TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.EISDIR, errno.ENOTDIR)

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_NOT_SUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)


def move(source: Path, target: Path) -> None:
    """Rename `source`, a file or folder, to `target`; an older target is replaced in one step.

    Links within the folder are kept. Links out of it are replaced by copies, since they lead to a temporary place.

    Raises OSError if that fails; `target` is then unchanged, or another writer's.
    """
    _take_in_what_links_lead_to(source)
    for path in [source, *source.rglob("*")]:
        if not path.is_symlink():
            sync(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        _take_name(source, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        copy(source, target)
        discard(source)


def copy(source: Path, target: Path) -> None:
    """Copy `source` to `target`, completely or not at all; `source` stays.

    Raises OSError if that fails; `target` is then unchanged, or another writer's.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    part = _beside(target, "part")
    _copy(source, part)
    _take_name(part, target)


def take_away(target: Path) -> None:
    """Remove a file or folder; it is renamed first, so that nobody reads half of it."""
    while left := [*_left_of(target, "old"), *([target] if os.path.lexists(target) else [])]:
        for path in left:
            discard(path)


def put_back(target: Path) -> None:
    """Restore the latest complete version if a writer was killed while it replaced it (6, 7)."""
    if not os.path.lexists(target):
        for old in sorted(_left_of(target, "old"), reverse=True)[:1]:
            try:
                os.rename(old, target)
            except OSError as error:
                if error.errno not in (errno.ENOENT, *_NAME_IS_TAKEN):
                    raise


def discard(path: Path) -> bool:
    """Delete a file, link or folder, but nothing in it that another process renames meanwhile; follows no link.

    Returns whether it existed. What cannot be deleted now (NFS keeps open files) is deleted once it is a day old.

    Raises OSError if it keeps its name.
    """
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        gone = _take_off(folder, path.name, folder)
        while gone:  # no recursion: a job may make folders of any depth
            name = gone.pop()
            with suppress(OSError):
                gone += _emptied(folder, name)
                os.rmdir(name, dir_fd=folder)
    except FileNotFoundError:
        return False
    finally:
        os.close(folder)
    return True


def discard_left(folder: Path) -> None:
    """Delete what killed writers and interrupted deletions left in a folder a day ago or earlier."""
    for path, left in _left_in(folder):
        is_old = time.time_ns() - int(left["time"], 16) > LEFT_AFTER * 1e9
        if is_old and (left["suffix"] != "old" or os.path.lexists(folder / left["name"])):
            discard(path)


def _take_off(folder: int, name: str, top: int) -> list[str]:
    """Delete a file or link in a folder; rename a folder into the folder `top`. Returns the new name, if any."""
    try:
        os.unlink(name, dir_fd=folder)
        return []
    except (IsADirectoryError, PermissionError):  # Linux, macOS
        gone = _new_name("discarded", "gone")
        os.rename(name, gone, src_dir_fd=folder, dst_dir_fd=top)
        return [gone]


def _emptied(top: int, name: str) -> list[str]:
    """Delete the files in a folder, and rename its folders into `top`; returns their new names."""
    inside, gone = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=top), []
    try:
        for name in os.listdir(inside):
            with suppress(OSError):
                gone += _take_off(inside, name, top)
    finally:
        os.close(inside)
    return gone


def _take_name(part: Path, target: Path) -> None:
    old: Path | None = None
    try:
        while (taken := _try_to_take_name(part, target)) is not True:
            if taken is None:
                continue
            if old is not None:
                discard(old)  # the version that has got the name since is newer
            try:
                os.rename(target, old := _beside(target, "old"))
            except FileNotFoundError:
                old = None
    except OSError:
        put_back(target)
        raise
    sync(target.parent)
    discard(part)
    if old is not None and not discard(old):
        raise FileNotFoundError(errno.ENOENT, "another process put it back or removed it meanwhile", str(target))
    discard_left(target.parent)


def _try_to_take_name(part: Path, target: Path) -> bool | None:
    """Return True if done, None if the name has become free, False if names cannot be exchanged."""
    try:
        os.rename(part, target)
        return True
    except OSError as error:
        if error.errno not in _NAME_IS_TAKEN:
            raise
    try:
        return exchange(part, target)
    except FileNotFoundError:  # the target; if it is the part, the next rename fails
        return None


def exchange(first: Path, second: Path) -> bool:
    """Give each of two files or folders the other's name; both exist at every moment (renameat2(2)).

    Returns whether the file system and the operating system can do that: NFS, CephFS and macOS cannot. Raises OSError
    if it fails, with nothing changed: ENOENT if one does not exist.
    """
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE):
        number = ctypes.get_errno()
        if number in _NOT_SUPPORTED:
            return False
        raise OSError(number, os.strerror(number), str(first), None, str(second))
    return True


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(_new_name(path.name, suffix))


def _new_name(name: str, suffix: str) -> str:
    """Return a unique name."""
    return f".{name}.{time.time_ns():016x}-{uuid.uuid4().hex[:12]}.{suffix}"


def _left_of(target: Path, suffix: str) -> list[Path]:
    return [path for path, left in _left_in(target.parent) if (left["name"], left["suffix"]) == (target.name, suffix)]


def _left_in(folder: Path) -> Iterator[tuple[Path, re.Match[str]]]:
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return
    yield from ((folder / name, left) for name in names if (left := _LEFT.fullmatch(name)))


def _copy(source: Path, part: Path) -> None:
    """Copy `source` to the disk with its times, but with the target folder's permissions."""
    if source.is_dir():
        part.mkdir()
        for path in source.iterdir():
            if path.is_symlink() and not _leads_out(path, source):
                (part / path.name).symlink_to(path.readlink())
            else:
                _copy(path, part / path.name)
    else:
        shutil.copyfile(source, part)
    times = source.stat()
    # A job may put one there.
    os.utime(part, ns=(times.st_atime_ns, times.st_mtime_ns), follow_symlinks=False)
    sync(part)


def _take_in_what_links_lead_to(source: Path) -> None:
    """Replace each link that leads out of `source`, or `source` itself if it is a link, by a copy."""
    paths = [source] if source.is_symlink() else source.rglob("*") if source.is_dir() else []
    for link in [path for path in paths if path.is_symlink() and _leads_out(path, source)]:
        inside = _beside(link, "part")
        _copy(link.resolve(strict=True), inside)
        link.unlink()
        inside.rename(link)


def _leads_out(link: Path, folder: Path) -> bool:
    """Return whether a link leads out of `folder`, or breaks once `folder` has another name."""
    if link == folder or link.readlink().is_absolute():
        return True
    return not link.resolve().is_relative_to(folder.resolve())
