"""The picture store: a folder in which every picture has a name that is the same on every machine.

    <pictures>/<data set>/coco/train2017/000000000009.jpg           link to the file in its root
    <pictures>/<data set>/chartqa/train/png/x.png.rgb.png           link to the rewritten copy
    <pictures>/.rewritten/<sha256 of the original>.1.png            plain RGB, upright

A rewritten copy is named after the bytes it was made from: it is made once, for all data sets, and one that
is there is right. Links are made in one step, and copies take their name whole, so a run that was killed
leaves nothing wrong behind, and runs may meet in one store.
"""

import errno
import fcntl
import io
import os
from contextlib import suppress
from pathlib import Path

from PIL import Image

from vlmflow.errors import PassingError, VlmflowError
from vlmflow.files import unfinished
from vlmflow.pictures.check import Picture
from vlmflow.pictures.paths import REWRITTEN_SUFFIX
from vlmflow.pictures.roots import Located

REWRITING = 1
"""To be raised when `pictures` turns the same bytes into other pixels: old copies are then no longer used."""

QUICK = 1
"""zlib's level: on photographs a tenth larger than the default, and several times quicker to write."""


class PictureStore:
    """The store of one data set.

    pictures: the folder that holds the stores of all data sets.
    dataset: its name.
    """

    def __init__(self, pictures: Path, dataset: str) -> None:
        self._rewritten = pictures.absolute() / ".rewritten"
        self._folder = pictures.absolute() / dataset

    def add(self, located: Located, picture: Picture, rgb: Image.Image | None) -> None:
        """Give a picture its name in the store.

        rgb: the pixels that are to be used in place of the file; None to use the file itself.
        """
        if rgb is not None:
            self._write_once(self._copy_of(picture), rgb)
        self.link(located, picture)

    def link(self, located: Located, picture: Picture) -> None:
        """Give a picture that was added before one more name."""
        link = self._folder / store_name(located, picture)
        target = os.path.relpath(self._copy_of(picture), link.parent) if picture.rewritten else located.file
        try:
            _put_link(link, target)
        except OSError as error:
            taken = error.errno in (errno.EINVAL, errno.EISDIR, errno.ENOTDIR, errno.EEXIST)
            raise (VlmflowError if taken else PassingError)(
                f"{link}: cannot be made a link: {error.strerror}",
                "something else has this name, or a name above it: move it away, and run the same command again"
                if taken
                else "mend that, or put the store elsewhere (config: stores.pictures), and run the same command again",
            ) from None

    def _copy_of(self, picture: Picture) -> Path:
        return self._rewritten / f"{picture.sha256}.{REWRITING}.png"

    def _write_once(self, copy: Path, rgb: Image.Image) -> None:
        if copy.exists():
            return
        png = io.BytesIO()
        rgb.save(png, "PNG", compress_level=QUICK)
        part = unfinished(copy)
        try:
            copy.parent.mkdir(parents=True, exist_ok=True)
            # Not emptied on opening: another run may be writing it, and holds the lock until it has its name.
            with part.open("ab") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                if copy.exists():
                    part.unlink(missing_ok=True)
                    return
                file.truncate(0)
                file.write(png.getbuffer())
                file.flush()
                os.fsync(file.fileno())
                part.replace(copy)
        except OSError as error:
            raise VlmflowError(
                f"{part}: {error.strerror}",
                "free space there, or put the store on a larger disk (config: stores.pictures), and run the "
                "same command again",
            ) from None


def store_name(located: Located, picture: Picture) -> str:
    """Give the name that training rows carry, relative to the data set's store."""
    return located.name if picture.rewritten is None else located.name + REWRITTEN_SUFFIX


def _put_link(link: Path, target: str) -> None:
    """Make `link` point to `target`; safe beside another process that does the same."""
    while True:
        try:
            os.symlink(target, link)
            return
        except FileNotFoundError:
            link.parent.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            with suppress(FileNotFoundError):  # another run has just removed it
                if os.readlink(link) == target:  # fails on anything but a link: nothing else is removed
                    return
                link.unlink()
