"""The picture store: a folder in which every picture has a name that is the same on every machine.

    <pictures>/<data set>/coco/train2017/000000000009.jpg           link to the file in its root
    <pictures>/<data set>/chartqa/train/png/x.png.rgb.png           link to the rewritten copy
    <pictures>/<mixture>/<data set>                                 link to the store of a data set that it mixes
    <pictures>/.embedded/embedded/<ab>/<sha256>.png                 picture out of a data file (`raw/named`)
    <pictures>/.rewritten/<sha256 of the original>.1.<its own sha256>.png    plain RGB, upright

A rewritten copy is named after the digests of the original and of its own bytes: it is made once for all data sets, and
every stage can check that it has not changed. Links are made in one step, and copies get their name when they are
complete, so a killed run leaves nothing wrong, and several runs may use one store at the same time.
"""

import errno
import fcntl
import hashlib
import io
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from vlmflow.core.account import refuse_changed
from vlmflow.core.errors import PassingError, VlmflowError
from vlmflow.core.files import unfinished
from vlmflow.pictures.manifest import REWRITTEN_SUFFIX, KnownPicture, PictureEntry, name_and_digest
from vlmflow.pictures.roots import Located

if TYPE_CHECKING:  # a plan, and stages that only compare pictures, need no Pillow
    from PIL import Image

    from vlmflow.pictures.decode import Picture

REWRITING = 1
"""Increase it when `pictures` turns the same bytes into other pixels: older copies are then no longer used."""

QUICK = 1
"""zlib's level: photographs become a tenth larger than with the default, and are written several times faster."""


class PictureStore:
    """The store of one data set.

    pictures: the folder with the stores of all data sets.
    dataset: its name.
    """

    def __init__(self, pictures: Path, dataset: str) -> None:
        self._rewritten = pictures.absolute() / ".rewritten"
        self._folder = pictures.absolute() / dataset

    def add(self, located: Located, picture: "Picture", rgb: "Image.Image | None") -> None:
        """Add a picture to the store.

        rgb: the pixels to use instead of the file; None to use the file itself.
        """
        self._link(located, picture, None if rgb is None else self._write_once(picture, rgb))

    def link(self, located: Located, picture: "Picture", added: str) -> None:
        """Add another name for a picture that was added under the name `added`."""
        copy = self._rewritten / os.path.basename(os.readlink(self._folder / added)) if picture.rewritten else None
        self._link(located, picture, copy)

    def mix(self, member: str) -> None:
        """Let the store have the pictures of another data set's, under that data set's name."""
        self._put(self._folder / member, os.path.join("..", member))

    def _link(self, located: Located, picture: "Picture", copy: Path | None) -> None:
        link = self._folder / store_name(located, picture)
        self._put(link, os.path.relpath(copy, link.parent) if copy else located.file)

    def _put(self, link: Path, target: str) -> None:
        try:
            _put_link(link, target)
        except OSError as error:
            taken = error.errno in (errno.EINVAL, errno.EISDIR, errno.ENOTDIR, errno.EEXIST)
            raise (VlmflowError if taken else PassingError)(
                f"{link}: cannot make a link: {error.strerror}",
                "something else has this name, or that of a parent folder: move it away, then run the same command "
                "again"
                if taken
                else "fix that, or put the store elsewhere (stores.pictures), then run the same command again",
            ) from None

    def _write_once(self, picture: "Picture", rgb: "Image.Image") -> Path:
        """Write the copy of a picture, unless it exists; returns its path."""
        png = io.BytesIO()
        rgb.save(png, "PNG", compress_level=QUICK)
        content = png.getbuffer()
        copy = self._rewritten / f"{_copy_prefix(picture.sha256)}{hashlib.sha256(content).hexdigest()}.png"
        if _holds(copy, content):
            return copy
        part = unfinished(copy)
        try:
            copy.parent.mkdir(parents=True, exist_ok=True)
            # Do not truncate it on opening: another run may be writing it, and holds the lock until it has its name.
            with part.open("ab") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                if _holds(copy, content):
                    part.unlink(missing_ok=True)
                    return copy
                file.truncate(0)
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
                part.replace(copy)
                return copy
        except OSError as error:
            raise VlmflowError(
                f"{part}: {error.strerror}",
                "free space there, or put the store on a larger disk (config: stores.pictures), and run the "
                "same command again",
            ) from None


def store_name(located: Located, picture: "Picture") -> str:
    """Return the picture's name in training rows, relative to the data set's store."""
    return located.name if picture.rewritten is None else located.name + REWRITTEN_SUFFIX


def refuse_changed_pictures(store: Path, entries: Iterable[KnownPicture | PictureEntry]) -> None:
    """Refuse pictures of a data set's store that are missing or have changed since they were checked.

    entries: usable ones of the manifest.

    Raises VlmflowError with their number, and what to do.
    """
    digests = {name_and_digest(entry)[0]: digest_in_store(store, entry) for entry in entries}
    next_step = f"restore them, or check them again: vlmflow refresh-pictures FILE {store.name}"
    refuse_changed("pictures", store, digests, f"pictures/{store.name}", next_step)


def digest_in_store(store: Path, entry: KnownPicture | PictureEntry) -> str:
    """Return the SHA-256 that the file in the store must have: the original's, or the copy's from its name."""
    name, sha256 = name_and_digest(entry)
    if entry.rewritten is None:
        return sha256
    try:
        copy = os.path.basename(os.readlink(store / name))
    except OSError:
        return ""
    prefix = _copy_prefix(sha256)
    return copy.removeprefix(prefix).removesuffix(".png") if copy.startswith(prefix) else ""


def _copy_prefix(sha256: str) -> str:
    return f"{sha256}.{REWRITING}."


def _holds(file: Path, content: memoryview) -> bool:
    """Return whether a file has these bytes; a changed copy is written again."""
    try:
        return file.stat().st_size == len(content) and file.read_bytes() == content
    except OSError:
        return False


def _put_link(link: Path, target: str) -> None:
    """Make `link` point to `target`; safe if another process does the same."""
    while True:
        try:
            os.symlink(target, link)
            return
        except FileNotFoundError:
            link.parent.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            with suppress(FileNotFoundError):  # another run has just removed it
                # Fails on anything but a link: nothing else is removed.
                if os.readlink(link) == target:
                    return
                link.unlink()
