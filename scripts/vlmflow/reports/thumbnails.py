"""Small copies of pictures for a page, as data URLs."""

import base64
import io
import os
from dataclasses import dataclass
from pathlib import Path

from vlmflow.config.settings import PictureLimits
from vlmflow.pictures.decode import check_picture, open_picture
from vlmflow.pictures.manifest import Unusable
from vlmflow.pictures.roots import read_picture

QUALITY = 82


RGB_BYTES = 4
"""The most bytes per pixel of a rewritten copy on the disk: three, and PNG's overhead."""


@dataclass(frozen=True)
class Shown:
    """A picture on a page. url: the data URL of its small copy; None if it cannot be shown."""

    url: str | None
    name: str


def thumbnail(picture: Path, side: int, limits: PictureLimits) -> str | None:
    """Return a picture, scaled down to at most `side` pixels, as the data URL of a JPEG without metadata.

    limits: those with which it was checked. The file may have changed since, so it is checked again; returns None if it
    cannot be shown.
    """
    max_bytes = max(limits.max_bytes, RGB_BYTES * limits.max_pixels)
    content = read_picture(os.path.realpath(picture), max_bytes)
    if isinstance(content, Unusable):
        return None
    checked = check_picture(content, limits)
    if isinstance(checked, Unusable):
        return None
    _, rgb = checked
    if rgb is None:
        with open_picture(io.BytesIO(content)) as image:
            rgb = image.convert("RGB")
    small = io.BytesIO()
    rgb.thumbnail((side, side))
    rgb.info.clear()  # drop comments, profiles and EXIF blocks of other people
    rgb.save(small, "JPEG", quality=QUALITY)
    return "data:image/jpeg;base64," + base64.b64encode(small.getvalue()).decode()
