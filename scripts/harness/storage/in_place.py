"""Giving a file or folder its final name, so that the name is there whole or not at all.

On one file system that is a rename. Elsewhere the bytes are copied beside the name and renamed there. Whatever a kill
leaves behind has a name of its own, `.NAME.TOKEN.part` or `.NAME.TOKEN.old`, which nothing reads and the next writer
of NAME removes.
"""

import errno
import os
import re
import shutil
import uuid
from pathlib import Path

from vlmflow.files import remove, sync


def move(source: Path, target: Path) -> None:
    """Give `source`, a file or folder, the name `target`; what was there before is replaced at the last moment.

    Links are kept where they lead to a place within the folder; what others lead to is copied, since `source` lies in
    a place that goes away.

    Raises OSError where that fails; `target` is then as it was, or not there.
    """
    _take_in_what_links_lead_to(source)
    part = _beside(target, "part")
    try:
        source.rename(part)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        _copy(source, part)
        _take_name(part, target)
        remove(source)
    else:
        _take_name(part, target)


def copy(source: Path, target: Path) -> None:
    """Copy `source` to the name `target`, which is there whole or not at all; `source` stays.

    Raises OSError where that fails; `target` is then as it was, or not there.
    """
    part = _beside(target, "part")
    _copy(source, part)
    _take_name(part, target)


def take_away(target: Path) -> None:
    """Remove a file or folder; a folder loses its name first, so that nobody reads half of it."""
    if target.is_dir() and not target.is_symlink():
        old = _beside(target, "old")
        target.rename(old)
        _discard(old)
    else:
        remove(target)


def _take_name(part: Path, target: Path) -> None:
    if target.is_dir() and not target.is_symlink():
        old = _beside(target, "old", keep=part)
        target.rename(old)
        part.rename(target)
        _discard(old)
    else:
        if part.is_dir():
            remove(target)  # a folder cannot be renamed over a file
        part.rename(target)


def _beside(target: Path, suffix: str, keep: Path | None = None) -> Path:
    """Give a new name in the folder of `target`, and remove what killed writers of `target` left there.

    A writer that lives nevertheless (on a node that was given up for lost) then fails, instead of mixing its files
    with ours: hence a new name each time.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    left = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{12}}\.(part|old)")
    for place in target.parent.iterdir():
        if left.fullmatch(place.name) and place != keep:
            _discard(place)
    return target.with_name(f".{target.name}.{uuid.uuid4().hex[:12]}.{suffix}")


def _discard(place: Path) -> None:
    """Remove what nobody reads by name any more; what cannot be removed (NFS keeps open files) waits for the next."""
    if place.is_dir():
        shutil.rmtree(place, ignore_errors=True)
    else:
        place.unlink(missing_ok=True)


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
    os.utime(part, ns=(times.st_atime_ns, times.st_mtime_ns))
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
