"""Giving a file or folder its final name, so that the name is there whole or not at all, for any number of writers.

Why that holds, on whatever machines the writers are, and wherever they are killed:

1. What gets the name is whole and on the disk before. Until then it lies where no other writer writes: in its writer's
   own folder, or beside the target as `.NAME.TIME-TOKEN.part`.
2. `rename` gives it a name that is free or a file's, `exchange` one that is a folder's. Each is one call, done or not
   done. So from the first success on, the name leads to one writer's whole version.
3. A writer that another one forestalls learns it from that call (ENOTEMPTY, ENOENT), which has changed nothing, and
   tries again. A writer returns after its own call was done, and does not touch the name again.
4. What is deleted is first renamed to a new name, `.discarded.TIME-TOKEN.gone`, and so is each folder in it before it
   is emptied. Nothing is deleted in what has the name or will get it: a writer whose folder is taken fails (ENOENT).
5. What killed writers left (`part`, `gone`) is deleted by the next writer to that folder once it is a day old, by its
   name. Should a writer be alive after a day, 4 holds.

Where names cannot be exchanged (NFS, CephFS, macOS), an older folder is renamed to `.NAME.TIME-TOKEN.old`, and the new
one then to the name, which is free between the two calls:

6. An `old` is whole, since it had the name. Its writer deletes it after it has taken the name, or before it makes
   another `old`; who removes the target does; and a writer does when it is a day old and the name is taken. So while
   the name is free after a success, the latest `old` is there, of a writer that is not done yet.
7. `put_back`, with which every look at a missing target begins, and every writer that fails ends, renames the latest
   `old` to the name. Where another version has come there meanwhile, that call changes nothing: folders that are
   targets hold Snakemake's time stamp and are never empty. A writer whose `old` was given back reports no success.
   This is for two writers, either of them killed, and any who look; with a third one, killed in the same moment, the
   name may lead to the version before the last, which is whole too.
"""

import errno
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from harness.storage.exchange import ExchangeNotSupportedError, exchange
from vlmflow.core.files import sync

LEFT_AFTER = 24 * 3600
"""Seconds after which what lies beside a target is taken for a killed writer's: no copy takes a day."""

_LEFT = re.compile(r"\.(?P<name>.+)\.(?P<time>[0-9a-f]{16})-[0-9a-f]{12}\.(?P<suffix>part|gone|old)")
_NAME_IS_TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.EISDIR, errno.ENOTDIR)


def move(source: Path, target: Path) -> None:
    """Give `source`, a file or folder, the name `target`; what was there before is replaced in one step.

    Links are kept where they lead to a place within the folder; what others lead to is copied, since `source` lies in
    a place that goes away.

    Raises OSError where that fails; `target` is then as it was, or another writer's.
    """
    _take_in_what_links_lead_to(source)
    for place in [source, *source.rglob("*")]:
        if not place.is_symlink():
            sync(place)
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        _take_name(source, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        copy(source, target)
        discard(source)


def copy(source: Path, target: Path) -> None:
    """Copy `source` to the name `target`, which is there whole or not at all; `source` stays.

    Raises OSError where that fails; `target` is then as it was, or another writer's.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    part = _beside(target, "part")
    _copy(source, part)
    _take_name(part, target)


def take_away(target: Path) -> None:
    """Remove a file or folder; it loses its name first, so that nobody reads half of it."""
    while left := [*_left_of(target, "old"), *([target] if os.path.lexists(target) else [])]:
        for place in left:
            discard(place)


def put_back(target: Path) -> None:
    """Give the latest whole version its name again where a writer was killed while it replaced it (6, 7)."""
    if not os.path.lexists(target):
        for old in sorted(_left_of(target, "old"), reverse=True)[:1]:
            try:
                os.rename(old, target)
            except OSError as error:
                if error.errno not in (errno.ENOENT, *_NAME_IS_TAKEN):
                    raise


def discard(place: Path) -> bool:
    """Delete a file, link or folder, and nothing of it that another process renames meanwhile; no link is followed.

    Gives whether it was there. What cannot be deleted now (NFS keeps open files) is once it is a day old.

    Raises OSError where it keeps its name.
    """
    folder = os.open(place.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        gone = _take_off(folder, place.name, folder)
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
    """Delete what killed writers, and deletions that were cut off, left in a folder a day ago or longer."""
    for place, left in _left_in(folder):
        is_old = time.time_ns() - int(left["time"], 16) > LEFT_AFTER * 1e9
        if is_old and (left["suffix"] != "old" or os.path.lexists(folder / left["name"])):
            discard(place)


def _take_off(folder: int, name: str, top: int) -> list[str]:
    """Delete a file or link of a folder; a folder gets a new name in the folder `top`, which is given."""
    try:
        os.unlink(name, dir_fd=folder)
        return []
    except (IsADirectoryError, PermissionError):  # Linux, macOS
        gone = _new_name("discarded", "gone")
        os.rename(name, gone, src_dir_fd=folder, dst_dir_fd=top)
        return [gone]


def _emptied(top: int, name: str) -> list[str]:
    """Delete what lies in a folder; gives the new names, in `top`, of the folders in it."""
    inside, gone = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=top), []
    try:
        for each in os.listdir(inside):
            with suppress(OSError):
                gone += _take_off(inside, each, top)
    finally:
        os.close(inside)
    return gone


def _take_name(part: Path, target: Path) -> None:
    old = None
    try:
        while (taken := _try_to_take_name(part, target)) is not True:
            if taken is None:
                continue
            if old is not None:
                discard(old)  # what has come to the name since is later
            old = _displaced(target)
    except OSError:
        put_back(target)
        raise
    sync(target.parent)
    discard(part)
    if old is not None and not discard(old):
        raise FileNotFoundError(errno.ENOENT, "another process put it back or removed it meanwhile", str(target))
    discard_left(target.parent)


def _try_to_take_name(part: Path, target: Path) -> bool | None:
    """Give True when it is done, None where the name has become free, False where names cannot be exchanged."""
    try:
        os.rename(part, target)
        return True
    except OSError as error:
        if error.errno not in _NAME_IS_TAKEN:
            raise
    try:
        exchange(part, target)
        return True
    except FileNotFoundError:  # the target; were it the part, the next rename would say so
        return None
    except ExchangeNotSupportedError:
        return False


def _displaced(target: Path) -> Path | None:
    old = _beside(target, "old")
    try:
        os.rename(target, old)
    except FileNotFoundError:
        return None
    return old


def _beside(place: Path, suffix: str) -> Path:
    return place.with_name(_new_name(place.name, suffix))


def _new_name(name: str, suffix: str) -> str:
    """Give a name that nobody has had before."""
    return f".{name}.{time.time_ns():016x}-{uuid.uuid4().hex[:12]}.{suffix}"


def _left_of(target: Path, suffix: str) -> list[Path]:
    return [place for place, left in _left_in(target.parent) if (left["name"], left["suffix"]) == (target.name, suffix)]


def _left_in(folder: Path) -> Iterator[tuple[Path, re.Match[str]]]:
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return
    yield from ((folder / name, left) for name in names if (left := _LEFT.fullmatch(name)))


def _copy(source: Path, part: Path) -> None:
    """Copy what `source` holds, with its times and the target folder's own permissions, to the disk."""
    if source.is_dir():
        part.mkdir()
        for place in source.iterdir():
            if place.is_symlink() and not _leads_out(place, source):
                (part / place.name).symlink_to(place.readlink())
            else:
                _copy(place, part / place.name)
    else:
        shutil.copyfile(source, part)
    times = source.stat()
    os.utime(part, ns=(times.st_atime_ns, times.st_mtime_ns), follow_symlinks=False)  # a job may put one there
    sync(part)


def _take_in_what_links_lead_to(source: Path) -> None:
    """Put a copy in the place of each link that leads out of `source`, or of `source` where it is a link itself."""
    places = [source] if source.is_symlink() else source.rglob("*") if source.is_dir() else []
    for link in [place for place in places if place.is_symlink() and _leads_out(place, source)]:
        inside = _beside(link, "part")
        _copy(link.resolve(strict=True), inside)
        link.unlink()
        inside.rename(link)


def _leads_out(link: Path, folder: Path) -> bool:
    """Tell whether a link means nothing any more once `folder` has another name."""
    if link == folder or link.readlink().is_absolute():
        return True
    return not link.resolve().is_relative_to(folder.resolve())
