"""The accepted formats of pictures, and how such files are opened: no other decoder of Pillow is ever tried.

Decodes one picture: detects the format, decodes every pixel, and converts to plain RGB if needed.
"""

import ctypes
import hashlib
import io
import math
import re
import resource
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import msgspec
from PIL import ExifTags, Image, _imaging, features
from PIL.IcoImagePlugin import IcoFile, IcoImageFile
from PIL.ImageFile import ImageFile
from PIL.TiffImagePlugin import TiffImageFile

from vlmflow.config.settings import PictureLimits
from vlmflow.core.files import LFS
from vlmflow.pictures.manifest import Unusable

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

NOT_READ = {
    re.compile(re.escape(LFS)): "a pointer of Git LFS: git lfs pull fetches the picture",
    re.compile(rb".{4}ftyp(?:hei[cmsx]|hev[cmx])", re.DOTALL): "HEIC: convert it to JPEG or PNG",
    re.compile(rb"\s*<(?:\?xml|svg|!DOCTYPE svg)"): "SVG, which has no pixels: draw it as PNG",
    re.compile(rb"\s*<(?:!doctype html|html)", re.IGNORECASE): "a web page: fetch the picture again",
}
"""Frequent files that are no pictures here, and what to do with them."""

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


def open_picture(file: Path | IO[bytes], formats: Sequence[str] = AS_THEY_ARE) -> ImageFile:
    """Open a picture, as `Image.open`; its pixels are decoded later, except an icon's.

    formats: those that are tried; by default those of a picture store.

    Raises nearly anything if it is none of them, or is damaged.
    """
    if "AVIF" in formats:
        from PIL import AvifImagePlugin  # few pictures need it, and its library takes 20 ms to load

        # Not as many as cores: each has a process of its own.
        AvifImagePlugin.DEFAULT_MAX_THREADS = 1
    return Image.open(file, formats=list(formats))


UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""The transposition that puts a picture upright, by its EXIF orientation. ImageOps.exif_transpose does the same, but
rewrites the whole EXIF block, and fails on a hostile one."""

PLAIN_MODES = frozenset({"RGB", "L", "1"})
"""Modes that `convert("RGB")`, the trainer's only conversion, turns into what a person sees."""

WHY_REWRITTEN = {"P": "palette", "CMYK": "cmyk", "I": "32 bit", "F": "32 bit"}
"""Why a mode without alpha is rewritten; other modes are named in lower case."""

DEPTHS = (8, 10, 12, 14, 16)
"""Bits of a grey level from cameras, scanners and microscopes."""

SCALED_TO_16_BIT = {("PPM", "I"), ("JPEG2000", "I;16")}
"""Formats and modes whose grey levels fill 16 bits: these files give their range, to which Pillow scales the levels."""

S_MAX_SAMPLE_VALUE = 341
"""TIFF's tag of the largest possible level of a sample (TIFF 6.0, section 19)."""

STRIP = 1 << 20
"""Pixels that are converted at a time."""

FOR_THE_DECODER = 80_000_000
BYTES_PER_PIXEL = 18
"""The most bytes that a decoder of CODECS may take: these, and so many per pixel of the limit. JPEG 2000 takes 18 for a
pixel of three channels. A hostile file of 30 KB makes it take 90, or AVIF's decode 16,384 x 16,384 pixels for a few."""

OBJECT_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""The address in Python's text of an object; it differs from run to run."""

# The configuration's limit applies instead, before the pixels are decoded.
Image.MAX_IMAGE_PIXELS = None


class Picture(msgspec.Struct, frozen=True):
    """A usable picture; the fields are those of `PictureEntry`."""

    format: str
    width: int
    height: int
    mode: str
    bytes: int
    sha256: str
    rewritten: str | None
    first_frame: bool | None


def check_picture(content: bytes, limits: PictureLimits) -> tuple[Picture, Image.Image | None] | Unusable:
    """Decode a picture completely, and return what it is, or why it cannot be used. Raises nothing.

    content: the bytes of the file.
    limits: those of pictures; sides and pixels are checked in the header, before anything is decoded.

    Returns the picture, and its pixels for the trainer if it must be rewritten: RGB, upright, white under alpha, levels
    of more than 8 bits scaled, the first frame of an animation, the largest size of an icon.
    """
    format = next((name for name, magic in MAGIC.items() if magic.match(content)), None)
    if format is None:
        named = next(
            (text for magic, text in NOT_READ.items() if magic.match(content)), f"begins with {content[:16]!r}"
        )
        return Unusable("unknown_format", named if content else "the file is empty")
    if format in CODECS and not features.check(CODECS[format]):
        return Unusable("unknown_format", f"{format}, which this build of Pillow cannot read")
    try:
        decoded = _decode(content, format, limits)
        if isinstance(decoded, Unusable):
            return decoded
        picture, rgb, turn = decoded  # the decoder and the file's own pixels are freed
        if turn is not None and rgb is not None:
            rgb = rgb.transpose(turn)
            picture = msgspec.structs.replace(picture, width=rgb.width, height=rgb.height)
        return picture, rgb
    except Exception as error:  # hostile bytes make Pillow raise nearly anything
        text = f"{format}, {type(error).__name__}: {error}"
        if format in CODECS:
            text += f" (in at most {_most_memory(limits) // 1_000_000:,} MB of memory)"
        return Unusable("undecodable", OBJECT_ADDRESS.sub("", text)[:200])


AT_USE = PictureLimits(min_side=17)
"""The limits of pictures that people and requests show a model: the widest on small ones, the usual ones else."""


def plain_picture(content: bytes, limits: PictureLimits) -> Image.Image | Unusable:
    """Return a picture's pixels as a store gives them to the trainer, in RGB. Raises nothing; see `check_picture`."""
    checked = check_picture(content, limits)
    if isinstance(checked, Unusable):
        return checked
    _, rgb = checked
    if rgb is None:
        with open_picture(io.BytesIO(content)) as image:
            rgb = image.convert("RGB")
    return rgb


def _outside_limits(width: int, height: int, limits: PictureLimits) -> Unusable | None:
    size = f"{width} x {height} pixels"
    if width * height > limits.max_pixels:
        return Unusable("too_many_pixels", f"{size}, the limit is {limits.max_pixels} in total")
    if min(width, height) < limits.min_side:
        return Unusable("too_small", f"{size}, the shorter side must have at least {limits.min_side}")
    if max(width, height) > limits.max_aspect * min(width, height):
        limit = f"the longer side may be at most {limits.max_aspect:g} times the shorter"
        return Unusable("too_elongated", f"{size}, {limit}")
    return None


def _huge_tiles(image: Image.Image, limits: PictureLimits) -> Unusable | None:
    """Refuse a TIFF with too large tiles: each tile is decoded completely, however small the picture is."""
    if not isinstance(image, TiffImageFile):
        return None
    width, height = (int(image.tag_v2.get(tag, 0)) for tag in (ExifTags.Base.TileWidth, ExifTags.Base.TileLength))
    if width * height > limits.max_pixels:
        return Unusable("too_many_pixels", f"tiles of {width} x {height} pixels, the limit is {limits.max_pixels}")
    return None


def _decode(
    content: bytes, format: str, limits: PictureLimits
) -> tuple[Picture, Image.Image | None, Image.Transpose | None] | Unusable:
    """Return the picture, its plain pixels if it must be rewritten, and the transposition that puts them upright."""
    if format == "ICO" and (outside := _outside_limits(*_icon_size(content), limits)):
        return outside
    with warnings.catch_warnings(action="ignore"), open_picture(io.BytesIO(content), [format]) as image:
        if outside := _outside_limits(*image.size, limits) or _huge_tiles(image, limits):
            return outside
        # Before the pixels: the bytes are still in the cache.
        sha256 = hashlib.sha256(content).hexdigest()
        with _bounded(format, limits):
            image.load()
        turn = _turn(image)
        why = [] if format in AS_THEY_ARE else [format]
        if turn is not None:
            why.append("exif orientation")
        if image.has_transparency_data:
            why.append("alpha")
        elif image.mode not in PLAIN_MODES:
            named = WHY_REWRITTEN.get(image.mode, image.mode.lower())
            why.append(f"{_depth(image)} bit" if _has_16_bits(image) else named)
        rgb = _plain_rgb(image) if why else None
        picture = Picture(
            format=image.format or format,
            width=image.width,
            height=image.height,
            mode=image.mode,
            bytes=len(content),
            sha256=sha256,
            rewritten=", ".join(why) or None,
            first_frame=_has_more(image) or None,
        )
        return picture, rgb, turn


@contextmanager
def _bounded(format: str, limits: PictureLimits) -> Iterator[None]:
    """Let a decoder of CODECS take only so much memory: it fails, and neither this process nor its neighbours."""
    if format not in CODECS:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    most = [taken + _most_memory(limits), *(given for given in (soft, hard) if given != resource.RLIM_INFINITY)]
    resource.setrlimit(resource.RLIMIT_AS, (min(most), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _most_memory(limits: PictureLimits) -> int:
    return FOR_THE_DECODER + BYTES_PER_PIXEL * limits.max_pixels


def _icon_size(content: bytes) -> tuple[int, int]:
    """Return the real size of an icon's largest picture, which Pillow decodes as it opens the file."""
    start = IcoFile(io.BytesIO(content)).entry[0].offset
    with open_picture(io.BytesIO(content[start:]), ["PNG", "DIB"]) as image:
        width, height = image.size
        return width, height if image.format == "PNG" else height // 2  # below it, its mask


def _has_more(image: Image.Image) -> bool:
    """Return whether the file has more frames, pages or sizes than the one that is used."""
    if isinstance(image, IcoImageFile):
        return image.ico.nb_items > 1
    try:
        return bool(getattr(image, "is_animated", False))
    except Exception:  # ignore damage behind the first frame, which is whole
        return False


def _turn(image: Image.Image) -> Image.Transpose | None:
    """Return the transposition that puts the picture upright, or None. Pillow itself turns a TIFF as it loads it."""
    try:
        return UPRIGHT.get(image.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:  # ignore a damaged EXIF block: the trainer does not read it
        return None


def _plain_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith(("I", "F")):
        rgb = _in_strips(image, _eight_bit(image))
    elif image.has_transparency_data:
        rgb = _in_strips(image, _on_white)
    else:
        rgb = image.convert("RGB")
    rgb.info.clear()  # otherwise the RGB copy would get the colour profile of a CMYK picture
    return rgb


def _in_strips(image: Image.Image, plain: Callable[[Image.Image], Image.Image]) -> Image.Image:
    """Convert a picture to RGB by `plain`, strip by strip, so that at most one copy of all pixels is made."""
    rgb = Image.new("RGB", image.size)
    for top, strip in _strips(image):
        rgb.paste(plain(strip), (0, top))
    return rgb


def _strips(image: Image.Image) -> Iterator[tuple[int, Image.Image]]:
    rows = max(1, STRIP // image.width)
    for top in range(0, image.height, rows):
        yield top, image.crop((0, top, image.width, min(top + rows, image.height)))


def _on_white(strip: Image.Image) -> Image.Image:
    white = Image.new("RGBA", strip.size, "white")
    white.alpha_composite(strip.convert("RGBA"))
    return white.convert("RGB")


def _eight_bit(image: Image.Image) -> Callable[[Image.Image], Image.Image]:
    """Return a function that scales grey levels to 0..255; 16 bit levels keep their eight highest bits.

    32 bit levels have no standard range: the picture's smallest and largest become black and white.
    """
    if _has_16_bits(image):
        low, factor = 0.0, 2.0 ** (8 - _depth(image))
    else:
        low, high = _ends(image)
        if not math.isfinite(high - low):
            raise ValueError("grey levels are not finite numbers")
        factor = 255 / ((high - low) or 1)
    transparent = image.info.get("transparency")

    # As in _ends: few pictures need it, and its import takes as long as the rest of the start.
    import numpy as np

    def scaled(strip: Image.Image) -> Image.Image:
        levels = np.asarray(strip)
        grey = np.subtract(levels, low, dtype=np.float64) * factor
        if isinstance(transparent, int):
            grey = np.where(levels == transparent, 255, grey)
        return Image.fromarray(grey.astype(np.uint8)).convert("RGB")

    return scaled


def _has_16_bits(image: Image.Image) -> bool:
    return image.mode.startswith("I;16") or (image.format, image.mode) in SCALED_TO_16_BIT


def _depth(image: Image.Image) -> int:
    """Return the bits that the grey levels of a 16 bit picture really use, 8 to 16.

    A TIFF may declare them: BitsPerSample, if not 16, or else SMaxSampleValue, whose default is 65535. Without a
    declaration (cameras and microscopes write 12 bits into 16), it is the smallest of DEPTHS that holds the largest
    level. PNG's sBIT is ignored: by the standard, levels fill the 16 bits whatever it says.
    """
    if (image.format, image.mode) in SCALED_TO_16_BIT:
        return 16
    declared = 16
    if isinstance(image, TiffImageFile):
        bits, greatest = (image.tag_v2.get(tag) for tag in (ExifTags.Base.BitsPerSample, S_MAX_SAMPLE_VALUE))
        declared = _first_number(bits, 16)
        declared = _first_number(greatest, 0).bit_length() if declared == 16 else declared
    held = int(_ends(image)[1]).bit_length()
    if 8 <= declared < 16 and held <= declared:
        return declared
    return next(depth for depth in DEPTHS if held <= depth)


def _first_number(value: object, default: int) -> int:
    """Return a tag's value, or the first of several; the default if it is missing or not a number."""
    first = value[0] if isinstance(value, tuple) and value else value
    return int(first) if isinstance(first, int | float) and math.isfinite(first) and first >= 0 else default


def _ends(image: Image.Image) -> tuple[float, float]:
    """Return the smallest and the largest grey level."""
    import numpy as np

    ends = np.array([(levels.min(), levels.max()) for levels in (np.asarray(strip) for _, strip in _strips(image))])
    return float(ends[:, 0].min()), float(ends[:, 1].max())
