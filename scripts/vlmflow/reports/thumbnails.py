"""Small copies of pictures for a page, as addresses that hold the bytes themselves."""

import base64
import io
import os
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from vlmflow.config.row_settings import PictureLimits
from vlmflow.pictures.decode import check_picture
from vlmflow.pictures.image_manifest import Unusable
from vlmflow.pictures.roots import read_picture

QUALITY = 82


RGB_BYTES = 4
"""Bytes that a pixel of a rewritten copy takes at most on the disk: three, and what PNG adds."""


@dataclass(frozen=True)
class Shown:
    """A picture on a page. url: the data URL of its small copy; None where it cannot be shown."""

    url: str | None
    name: str


def thumbnail(picture: Path, side: int, limits: PictureLimits) -> str | None:
    """Give a picture, scaled down to at most `side` pixels, as the data URL of a JPEG of its pixels alone.

    limits: those by which it was checked. The file may have changed since, so it is checked again; None where it cannot
    be shown.
    """
    max_bytes = max(limits.max_bytes, RGB_BYTES * limits.max_pixels)
    content = read_picture(os.path.realpath(picture), max_bytes)
    if isinstance(content, Unusable):
        return None
    checked = check_picture(content, limits)
    if isinstance(checked, Unusable):
        return None
    found, rgb = checked
    if rgb is None:
        with Image.open(io.BytesIO(content), formats=[found.format]) as image:
            rgb = image.convert("RGB")
    small = io.BytesIO()
    rgb.thumbnail((side, side))
    rgb.info.clear()  # no comments, profiles or EXIF blocks of strangers
    rgb.save(small, "JPEG", quality=QUALITY)
    return "data:image/jpeg;base64," + base64.b64encode(small.getvalue()).decode()
