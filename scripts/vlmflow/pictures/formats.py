"""The accepted formats of pictures, and how such files are opened: no other decoder of Pillow is ever tried."""

import ctypes
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from PIL import Image, _imaging, features
from PIL.ImageFile import ImageFile

MAGIC = {
    "JPEG": re.compile(rb"\xff\xd8\xff"),
    "PNG": re.compile(rb"\x89PNG\r\n\x1a\n"),
    "GIF": re.compile(rb"GIF8[79]a"),
    "WEBP": re.compile(rb"RIFF.{4}WEBP", re.DOTALL),
    "BMP": re.compile(rb"BM"),
    "TIFF": re.compile(rb"II[*+]\x00|MM\x00[*+]"),
    "AVIF": re.compile(rb".{4}ftyp(?:avi[fs]|m[is]f1.{4}(?:.{4}){0,9}?avi[fs])", re.DOTALL),
    "JPEG2000": re.compile(rb"\xff\x4f\xff\x51|\x00\x00\x00\x0cjP  \r\n\x87\n"),
    "PPM": re.compile(rb"P[1-6][ \t\r\n](?:[ \t\r\n]|#[^\r\n]*+[\r\n])*+[0-9]"),
    "ICO": re.compile(rb"\x00\x00\x01\x00(?!\x00\x00)"),
    "TGA": re.compile(
        rb".(?:\x00[\x02\x0a]\x00{5}.{8}[\x10\x18\x20]|\x00[\x03\x0b]\x00{5}.{8}[\x01\x08\x10]"
        rb"|\x01[\x01\x09].{4}[\x10\x18\x20].{8}\x08)[\x00-\x3f]",
        re.DOTALL,
    ),
}
"""The accepted formats, by Pillow's names, and how their files begin. TGA, the last, has no such mark: it is known by
the fields of its header, whose values go together and of which most are control characters, so no text begins so. An
AVIF that names another brand first lists its own; a HEIC has none."""

AS_THEY_ARE = ("JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF")
"""The formats that trainers and servers read; a picture of another one is always rewritten. A picture of JPEG may be
one of MPO."""

CODECS = {"AVIF": "avif", "JPEG2000": "jpg_2000"}
"""The formats that some builds of Pillow lack, and what `PIL.features` calls them."""

with suppress(AttributeError, OSError):  # in a build that keeps libtiff to itself
    # It writes each fault of a file to the terminal by itself. Pillow raises the errors; the trainer sees no warning.
    _libraries = ctypes.CDLL(_imaging.__file__)
    _libraries.TIFFSetWarningHandler(None)
    _libraries.TIFFSetErrorHandler(None)


def format_of(content: bytes) -> str | None:
    """Return the format of a picture by the first bytes of its file; None if it is not an accepted one."""
    return next((name for name, magic in MAGIC.items() if magic.match(content)), None)


def is_readable(format: str) -> bool:
    """Return whether this build of Pillow has what decodes a format."""
    return format not in CODECS or bool(features.check(CODECS[format]))


def open_picture(file: Path | IO[bytes], formats: Sequence[str] = AS_THEY_ARE) -> ImageFile:
    """Open a picture, as `Image.open`; its pixels are decoded later, except an icon's.

    formats: those that are tried; by default those of a picture store.

    Raises nearly anything if it is none of them, or is damaged.
    """
    if "AVIF" in formats:
        from PIL import AvifImagePlugin  # few pictures need it, and its library takes 20 ms to load

        AvifImagePlugin.DEFAULT_MAX_THREADS = 1  # not as many as cores: each has a process of its own
    return Image.open(file, formats=list(formats))
