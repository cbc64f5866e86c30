import base64
import hashlib
import io
import math
import os
import re
import struct
import subprocess
import sys
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps, PngImagePlugin, features

from drawn_pictures import drawn, encoded, put
from vlmflow.config.data_settings import PictureLimits
from vlmflow.pictures import decode
from vlmflow.pictures.decode import AS_THEY_ARE, CODECS, MAGIC, UPRIGHT, Picture, check_picture
from vlmflow.pictures.manifest import REASONS, Unusable
from workflow_runs import ROOT

LIMITS = PictureLimits()
RED = (255, 0, 0)


def checked(content: bytes) -> tuple[Picture, Image.Image | None]:
    found = check_picture(content, LIMITS)
    assert not isinstance(found, Unusable), found
    return found


def rgb(content: bytes) -> np.ndarray:
    """Return the pixels of the rewritten copy, as an array of shape (height, width, 3)."""
    copy = checked(content)[1]
    assert copy.mode == "RGB"
    return np.asarray(copy)


PLAIN = {
    "JPEG": encoded(drawn(), "JPEG", quality=95),
    "MPO": encoded(drawn(), "MPO", save_all=True, append_images=[drawn()]),
    "PNG": encoded(drawn(), "PNG"),
    "WEBP": encoded(drawn(), "WEBP", lossless=True),
    "BMP": encoded(drawn(), "BMP"),
    "TIFF": encoded(drawn(), "TIFF", compression="tiff_lzw"),
    "GIF": encoded(drawn().convert("L"), "GIF"),
}


REWRITTEN = {
    "AVIF": encoded(drawn(), "AVIF", quality=95, subsampling="4:4:4"),
    "JPEG2000": encoded(drawn(), "JPEG2000"),
    "PPM": encoded(drawn(), "PPM"),
    "ICO": encoded(drawn(64, 64), "ICO", sizes=[(64, 64)]),
    "TGA": encoded(drawn(), "TGA"),
}


@pytest.mark.parametrize("format", ["JPEG", "MPO", "PNG", "WEBP", "BMP", "TIFF"])
def test_plain_pictures_are_used_as_they_are(format: str):
    """The bytes decide the format, not the name."""
    picture, copy = checked(PLAIN[format])
    assert (picture.format, picture.width, picture.height, picture.rewritten) == (format, 64, 48, None)
    assert (picture.mode, picture.bytes, copy) == ("RGB", len(PLAIN[format]), None)
    assert picture.sha256 == hashlib.sha256(PLAIN[format]).hexdigest()


@pytest.mark.parametrize(
    ("format", "content"),
    [
        *REWRITTEN.items(),
        ("JPEG2000", encoded(drawn(), "JPEG2000", no_jp2=True)),
        ("PPM", b"P3 # plain\n#\n 64 48 255\n" + b" ".join(b"%d" % level for level in drawn().tobytes())),
        ("TGA", encoded(drawn(), "TGA", rle=True)),
    ],
)
def test_pictures_that_no_trainer_need_read_are_rewritten(format: str, content: bytes):
    """Whatever their mode; each has the size and the corners of the picture that was drawn."""
    picture, copy = checked(content)
    assert (picture.format, picture.rewritten, copy.mode) == (format, format, "RGB")
    side = 64 if format == "ICO" else 48
    assert (picture.width, picture.height) == copy.size == (64, side)
    assert np.abs(rgb(content).astype(int) - np.asarray(drawn(64, side))).max() <= 12


@pytest.mark.parametrize("mode", ["L", "1"])
def test_grey_maps_and_bitmaps_are_rewritten(mode: str):
    content = encoded(drawn().convert(mode), "PPM")
    assert content[:2] == {"L": b"P5", "1": b"P4"}[mode]
    assert checked(content)[0].rewritten == "PPM"
    assert np.array_equal(rgb(content), np.asarray(drawn().convert(mode).convert("RGB")))


def test_every_format_is_there():
    """Those that trainers read, and the others; each is known by its first bytes."""
    assert {*AS_THEY_ARE, *REWRITTEN} == set(MAGIC)
    for format, content in (PLAIN | REWRITTEN).items():
        assert [name for name, magic in MAGIC.items() if magic.match(content)] == [
            "JPEG" if format == "MPO" else format
        ]


def test_pictures_are_opened_in_one_place():
    """Elsewhere Pillow would try all its decoders."""
    opening = [path.name for path in (ROOT / "scripts").rglob("*.py") if "Image.open(" in path.read_text()]
    assert sorted(opening) == ["decode.py"]


@pytest.mark.parametrize("format", CODECS)
def test_a_format_that_pillow_was_built_without_is_named(monkeypatch: pytest.MonkeyPatch, format: str):
    monkeypatch.setitem(features.modules, "avif", ("PIL._not_built", None))
    monkeypatch.setitem(features.codecs, "jpg_2000", ("not_built", None))
    found = check_picture(REWRITTEN[format], LIMITS)
    assert found == Unusable("unknown_format", f"{format}, which this build of Pillow cannot read")
    assert checked(PLAIN["JPEG"])


@pytest.mark.parametrize("mode", ["L", "1"])
def test_grey_and_black_and_white_are_plain(mode: str):
    assert checked(encoded(drawn().convert(mode), "PNG"))[0].rewritten is None


@pytest.mark.parametrize("format", [*PLAIN, *REWRITTEN])
@pytest.mark.parametrize("share", [0.5, 0.9])
def test_cut_files_are_caught(format: str, share: float, recwarn: pytest.WarningsRecorder):
    """The header of half a file is valid, but pixels are missing. Pillow's warnings are off."""
    content = (PLAIN | REWRITTEN)[format if format != "MPO" else "JPEG"]
    found = check_picture(content[: int(len(content) * share)], LIMITS)
    assert isinstance(found, Unusable)
    assert found.reason == "undecodable"
    assert not recwarn.list


def test_damaged_pixels_are_caught():
    """A block of zeros in the middle, as after a broken download."""
    for format in ("PNG", "WEBP"):
        content = bytearray(PLAIN[format])
        content[len(content) // 2 : len(content) // 2 + 40] = bytes(40)
        assert check_picture(bytes(content), LIMITS).reason == "undecodable", format


OTHERS = [
    *(b"", b"<!DOCTYPE html><html>", b"%PDF-1.7", b"RIFF\x00\x00\x00\x00WAVE", b"\x00" * 100),
    *(b"P3 is not P6 64", b"P5\n# only a remark\n", b"P6" + b" " * 9_999, b"P7\nWIDTH 64\n", b"Pf\n64 48\n-1.0\n"),
    *("P1 ".encode("utf-16-le"), b"\x01\x02\t\n or any text of more than 18 letters"),
    *("a\nb, c  d  efg hijk\n".encode("utf-16-le"), "\n\n\na text of lines\n\n\n".encode("utf-16-be")),
    *(b"\x00\x00\x01\x00\x00\x00", b"\x00\x00\x02\x00\x01\x00" + b"\x20" * 20),
    *(b"\x00\x00\x00\x18ftyp" + brands for brands in (b"heic\0\0\0\0mif1heic", b"mif1\0\0\0\0mif1heic", b"mp42avif")),
    *(encoded(drawn(), format) for format in ("PCX", "SGI", "DDS", "QOI")),
]


@pytest.mark.parametrize("content", OTHERS)
def test_other_formats_are_refused(content: bytes):
    """An error page, a document, a sound, texts, a cursor, HEIC, a video, and pictures of other formats."""
    assert check_picture(content, LIMITS).reason == "unknown_format"


def test_the_detail_is_the_same_in_every_run():
    """Pillow's message contains the address of an object."""
    found = check_picture(PLAIN["GIF"][:30], LIMITS)
    assert found.detail == "GIF, UnidentifiedImageError: cannot identify image file <_io.BytesIO object>"


def test_a_decompression_bomb_is_refused_before_it_is_decoded():
    """2.5 billion pixels in a hundred bytes, without Pillow's warning."""
    header = struct.pack(">IIBBBBB", 50_000, 50_000, 8, 2, 0, 0, 0)
    bomb = b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", header) + png_chunk(b"IDAT", zlib.compress(b""))
    with warnings.catch_warnings(record=True, action="always") as caught:
        found = check_picture(bomb, LIMITS)
    assert found.reason == "too_many_pixels"
    assert "50000 x 50000" in found.detail
    assert not caught


def with_size(content: bytes, size: bytes, other: bytes) -> bytes:
    """Return a picture with another size in its header."""
    assert content.count(size) == 1
    return content.replace(size, other)


def png_chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


BIG = (60_000, 60_000)
IHDR = struct.pack(">4sII", b"ihdr", *BIG)
PNG = PLAIN["PNG"]
BOMBS = {
    "AVIF": with_size(REWRITTEN["AVIF"], struct.pack(">II", 64, 48), struct.pack(">II", 16_000, 16_000)),
    "JPEG2000": with_size(REWRITTEN["JPEG2000"], struct.pack(">4sII", b"ihdr", 48, 64), IHDR),
    "PPM": with_size(REWRITTEN["PPM"], b"\n64 48\n", b"\n60000 60000\n"),
    "TGA": with_size(REWRITTEN["TGA"], struct.pack("<HHB", 64, 48, 24), struct.pack("<HHB", *BIG, 24)),
    "ICO": REWRITTEN["ICO"][:22]
    + PNG[:8]
    + png_chunk(b"IHDR", struct.pack(">IIBBBBB", *BIG, 8, 2, 0, 0, 0))
    + PNG[33:],
    "ICO of BMP": with_size(
        encoded(drawn(64, 64), "ICO", sizes=[(64, 64)], bitmap_format="bmp"),
        struct.pack("<III", 40, 64, 128),
        struct.pack("<III", 40, 60_000, 120_000),
    ),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_of_any_format_is_refused_before_it_is_decoded(name: str):
    found = check_picture(BOMBS[name], LIMITS)
    assert found.reason == "too_many_pixels", found
    assert ("16000 x 16000" if name == "AVIF" else "60000 x 60000") in found.detail


LARGE_AVIF = (
    "eNpjYGCQSSupLEgsy0xjAAIQnZuZZpibmQjiv8xNLUlkgADFjJScIiiboSAzuYQBDfAVZJbkglmMQCyXmZOfDOK4gPiMEFFGXgYG9oVAtkZmZl"
    "4aXK0UkJPKBOUllhkYOufn5IPtysgsKCoA0p6ZBcn5QFoks7ggFWKdXQMEg+ytyARr5gASPIllhs6N8jIgAeHk/JyivOScCqC5vAxsIMXimQW5"
    "MB8BncXCyNTMAnTTytyUxBIhBi5u+e919T//LmOS4nUw6ucXUEo2amT5BDTX8vy5wA/8Z7w+hlXmJV+5xZE/YV9jlb5vWXeZiKn2kUMXPhZYBm"
    "48fzY303CW1eN3c6c1n+R1TQp+3XZZSc36/LmImuAuH40gSwOfbdFvzqy49sDwaP+Xp2dPTC6ymPx/y7XaOUf8LHYb7JV7w8kVfO74B19Ny56Z"
    "7725xe9+oEizFUHNdYd1Ex3lN6lFiu++GrZ1XhzvXS7X8DMRos9zBs7Vo14e9fKol0e9POpl0rxsTqbFBvTXSJ4vTwEAq7orQg=="
)
"""An AVIF of 16,000 x 16,000 black pixels, packed; to make it takes seven seconds."""


CHECKED_ALONE = """
import resource, sys
from vlmflow.config.settings import PictureLimits
from vlmflow.pictures.decode import check_picture
before = resource.getrlimit(resource.RLIMIT_AS)
found = check_picture(sys.stdin.buffer.read(), PictureLimits(max_pixels=10_000))
print(found.reason, found.detail, resource.getrlimit(resource.RLIMIT_AS) == before, sep="\\n")
"""


def test_a_decoder_gets_so_much_memory_and_no_more():
    """Two sizes in one AVIF: it says that it is of 100 x 100 pixels, and its decoder makes 256 million of them."""
    large = zlib.decompress(base64.b64decode(LARGE_AVIF))
    assert check_picture(large, LIMITS).reason == "too_many_pixels"
    bomb = with_size(large, struct.pack(">II", 16_000, 16_000), struct.pack(">II", 100, 100))
    # In a process of its own: this one may still have the memory of earlier tests, which the limit does not count.
    call, paths = [sys.executable, "-c", CHECKED_ALONE], {"PYTHONPATH": str(ROOT / "scripts")}
    said = subprocess.run(call, input=bomb, env=os.environ | paths, capture_output=True, check=True).stdout.decode()
    reason, detail, same_limit = said.splitlines()
    assert reason == "undecodable"
    assert detail.endswith("(in at most 80 MB of memory)")
    assert same_limit == "True"


def test_the_pixel_limit_is_the_one_of_the_configuration():
    assert check_picture(PLAIN["PNG"], PictureLimits(max_pixels=64 * 48 - 1)).reason == "too_many_pixels"
    assert checked(PLAIN["PNG"])


def tiled_tiff(side: int) -> bytes:
    """Return a TIFF of 100 x 100 pixels, cut out of a tile of `side` x `side`."""
    tile = zlib.compressobj(9)
    content = b"".join(tile.compress(bytes(3 * side)) for _ in range(side)) + tile.flush()
    fields = {256: 100, 257: 100, 258: 8, 259: 8, 262: 2, 277: 3, 322: side, 323: side, 324: 200, 325: len(content)}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in fields.items())
    head = b"II*\x00" + struct.pack("<IH", 8, len(fields)) + entries + bytes(4)
    return head.ljust(200, b"\x00") + content


def test_a_tile_is_a_decompression_bomb_too():
    """Libtiff decodes a tile whole: 147 MB for a picture of 100 x 100 pixels."""
    assert checked(tiled_tiff(128))[0].width == 100
    found = check_picture(tiled_tiff(7_000), LIMITS)
    assert found == Unusable("too_many_pixels", "tiles of 7000 x 7000 pixels, the limit is 40000000")


LARGE = (8_000, 5_000)
"""As many pixels as the default allows."""

LYING = Image.Exif()
LYING[0x0112] = 6

LARGEST: dict[str, Callable[[], bytes]] = {
    "PNG with alpha": lambda: encoded(Image.new("RGBA", LARGE, (9, 9, 9, 9)), "PNG", compress_level=1),
    "TIFF of floats": lambda: encoded(
        Image.fromarray(np.arange(math.prod(LARGE), dtype=np.float32).reshape(LARGE) % 999),
        "TIFF",
        compression="tiff_lzw",
    ),
    "JPEG 2000": lambda: encoded(Image.new("RGB", LARGE, (9, 9, 9)), "JPEG2000"),
    "AVIF with alpha": lambda: encoded(Image.new("RGBA", LARGE, (9, 9, 9, 9)), "AVIF", speed=10),
    "WebP with alpha, lying": lambda: encoded(Image.new("RGBA", LARGE, (9, 9, 9, 9)), "WEBP", method=0, exif=LYING),
}

CHECK_ONE = """
import sys
from pathlib import Path
from vlmflow.config.data_settings import PictureLimits
from vlmflow.pictures.decode import check_picture
from vlmflow.pictures.roots import Located
from vlmflow.pictures.store import PictureStore
file = sys.argv[1]
picture, rgb = check_picture(Path(file).read_bytes(), PictureLimits())
PictureStore(Path(file).parent, "fire").add(Located("a.png", file), picture, rgb)
print(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
"""


@pytest.mark.lengthy
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if "floats" in name else pytest.mark.slow) for name in LARGEST]
)
def test_a_worker_has_room_for_the_largest_picture(tmp_path: Path, name: str):
    """Compare the peak memory of a process that checks and writes it with what the rule declares per thread."""
    rule = (ROOT / "rules" / "resolve_images.smk").read_text()
    threads, mem_mb = (int(re.search(rf"^ +{key}[=:] *([\d_]+)", rule, re.M)[1]) for key in ("threads", "mem_mb"))
    file = put(tmp_path / "large", LARGEST[name]())
    done = subprocess.run(
        [sys.executable, "-c", CHECK_ONE, file],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": str(ROOT / "scripts")},
    )
    assert int(done.stdout) * 1024 < mem_mb * 1_000_000 / threads - LIMITS.max_bytes


def test_a_picture_is_made_plain_alike_in_strips_of_any_size(monkeypatch: pytest.MonkeyPatch):
    rng = np.random.default_rng(0)
    grey = rng.normal(0, 500, (53, 70))
    alpha = Image.frombytes("RGBA", (70, 53), rng.bytes(70 * 53 * 4))
    contents = [
        encoded(alpha, "PNG"),
        encoded(alpha.convert("LA"), "PNG"),
        encoded(alpha.convert("RGB").quantize(200), "PNG", transparency=bytes(range(200))),
        encoded(Image.fromarray(grey.astype(np.float32)), "TIFF"),
        encoded(Image.fromarray(grey.astype(np.int32)), "TIFF"),
        encoded(Image.fromarray((grey + 3000).astype(np.uint16)), "PNG", transparency=3000),
    ]
    whole = [rgb(content) for content in contents]
    monkeypatch.setattr(decode, "STRIP", 200)
    for content, pixels in zip(contents, whole, strict=True):
        assert np.array_equal(rgb(content), pixels)


def test_an_oversized_text_chunk_is_refused():
    """A compressed text of 2 MB in a small PNG."""
    text = PngImagePlugin.PngInfo()
    text.add_text("comment", "x" * (2 << 20), zip=True)
    found = check_picture(encoded(drawn(), "PNG", pnginfo=text), LIMITS)
    assert (found.reason, "MAX_TEXT_CHUNK" in found.detail) == ("undecodable", True)


@pytest.mark.parametrize(
    ("width", "height", "reason"),
    [
        (27, 100, "too_small"),
        (100, 27, "too_small"),
        (28, 28, None),
        (28, 5600, None),
        (5601, 28, "too_elongated"),
    ],
)
def test_tiny_and_elongated_pictures_are_refused(width: int, height: int, reason: str | None):
    """The limits themselves are allowed."""
    found = check_picture(encoded(Image.new("L", (width, height)), "PNG"), LIMITS)
    assert getattr(found, "reason", None) == reason


@pytest.mark.parametrize("orientation", range(1, 9))
def test_pictures_are_put_upright(orientation: int):
    """The eight EXIF orientations."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = encoded(drawn(), "JPEG", quality=95, exif=exif)
    picture, copy = checked(content)
    if orientation == 1:
        assert (picture.rewritten, copy) == (None, None)
        return
    assert picture.rewritten == "exif orientation"
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(content)))
    assert (picture.width, picture.height) == upright.size
    assert np.array_equal(np.asarray(copy), np.asarray(upright))
    assert not copy.info


def test_orientation_in_a_png_and_in_a_tiff():
    """Pillow rotates a TIFF when it loads it, for us and for the trainer."""
    exif = Image.Exif()
    exif[0x0112] = 6
    picture, copy = checked(encoded(drawn(), "PNG", exif=exif))
    assert (picture.width, picture.height, picture.rewritten) == (48, 64, "exif orientation")
    assert np.array_equal(np.asarray(copy), np.asarray(drawn().transpose(UPRIGHT[6])))
    picture, copy = checked(encoded(drawn(), "TIFF", exif=exif))
    assert (picture.width, picture.height, picture.rewritten) == (48, 64, None)


def test_a_hostile_exif_block_is_ignored():
    """No orientation can be read; the trainer would not read one either."""
    content = encoded(drawn(), "JPEG", exif=b"Exif\x00\x00MM\x00*\xff\xff\xff\xff" + b"\xff" * 60)
    assert checked(content)[0].rewritten is None


def half_transparent(mode: str) -> Image.Image:
    """Red: opaque on the left, half transparent in the middle, black and fully transparent on the right."""
    image = Image.new("RGBA", (90, 30), (*RED, 255))
    image.paste((*RED, 128), (30, 0, 60, 30))
    image.paste((0, 0, 0, 0), (60, 0, 90, 30))
    return image.convert(mode)


@pytest.mark.parametrize("format", ["PNG", "WEBP", "TIFF"])
def test_transparency_becomes_white(format: str):
    """RGBA, where `convert("RGB")` alone gives black."""
    content = encoded(half_transparent("RGBA"), format, **({"lossless": True} if format == "WEBP" else {}))
    assert checked(content)[0].rewritten == "alpha"
    pixels = rgb(content)
    assert pixels[15, 15].tolist() == [255, 0, 0]
    assert np.allclose(pixels[15, 45], [255, 127, 127], atol=1)
    assert pixels[15, 75].tolist() == [255, 255, 255]


def test_white_shines_through_grey_with_alpha():
    pixels = rgb(encoded(half_transparent("LA"), "PNG"))
    assert pixels[15, 15].tolist() == [76, 76, 76]
    assert pixels[15, 75].tolist() == [255, 255, 255]


@pytest.mark.parametrize(
    ("mode", "key"),
    [("RGB", (0, 0, 0)), ("L", 0), ("1", 0), ("I;16", 0)],
)
def test_white_shines_through_a_colour_that_a_png_calls_transparent(mode: str, key: object):
    """The tRNS chunk, with no alpha in the mode."""
    image = Image.new("L", (60, 30), 255)
    image.paste(0, (30, 0, 60, 30))
    if mode == "I;16":
        image = Image.fromarray(np.asarray(image).astype(np.uint16) * 128)
    content = encoded(image if mode == "I;16" else image.convert(mode), "PNG", transparency=key)
    assert checked(content)[0].rewritten == "alpha"
    pixels = rgb(content)
    assert pixels[15, 15].tolist() == ([127] * 3 if mode == "I;16" else [255] * 3)
    assert pixels[15, 45].tolist() == [255] * 3


@pytest.mark.parametrize("format", ["PNG", "GIF"])
def test_a_palette_with_a_transparent_colour(format: str):
    """Bytes of alpha in a PNG, one index in a GIF."""
    image = Image.new("P", (60, 30), 1)
    image.putpalette([0, 0, 255, *RED])
    image.paste(0, (30, 0, 60, 30))
    content = encoded(image, format, transparency=b"\x00" if format == "PNG" else 0)
    assert checked(content)[0].rewritten == "alpha"
    pixels = rgb(content)
    assert pixels[15, 15].tolist() == list(RED)
    assert pixels[15, 45].tolist() == [255] * 3


def test_a_palette_becomes_its_colours():
    image = drawn().quantize(16)
    content = encoded(image, "PNG")
    assert checked(content)[0].rewritten == "palette"
    assert np.array_equal(rgb(content), np.asarray(image.convert("RGB")))


def test_of_an_animation_the_first_frame_is_used():
    """A GIF named .jpg is most often one of these."""
    frames = [Image.new("P", (40, 40), colour) for colour in (1, 0)]
    for frame in frames:
        frame.putpalette([0, 0, 255, *RED])
    content = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert Image.open(io.BytesIO(content)).n_frames == 2
    assert (checked(content)[0].format, checked(content)[0].rewritten) == ("GIF", "palette")
    assert (rgb(content) == RED).all()


FRAMES = [Image.new("RGB", (64, 64), colour) for colour in (RED, (0, 0, 255))]


@pytest.mark.parametrize("format", ["GIF", "TIFF", "WEBP", "PNG", "MPO", "AVIF"])
def test_a_picture_of_several_frames_is_told_from_others(format: str):
    several = encoded(FRAMES[0], format, save_all=True, append_images=FRAMES[1:])
    assert (checked(several)[0].first_frame, checked(encoded(FRAMES[0], format))[0].first_frame) == (True, None)


def test_of_an_icon_the_largest_size_is_used():
    picture, copy = checked(encoded(FRAMES[0], "ICO", sizes=[(32, 32), (64, 64), (48, 48)]))
    assert (picture.width, picture.height, picture.first_frame) == (64, 64, True)
    assert copy.size == (64, 64)
    assert checked(REWRITTEN["ICO"])[0].first_frame is None


def test_damage_behind_the_first_frame_costs_nothing():
    """The frames were not looked for before; the first one is whole."""
    content = encoded(FRAMES[0], "GIF", save_all=True, append_images=FRAMES[1:])
    second = content.rindex(b"\x2c\x00\x00\x00\x00")
    assert checked(content[: second + 4] + b"\xff" * 20)[0].format == "GIF"


def test_cmyk_becomes_rgb():
    """With Adobe's inverted values, which Pillow's JPEG reader knows."""
    content = encoded(drawn().convert("CMYK"), "JPEG", quality=95, icc_profile=b"a profile of CMYK")
    assert checked(content)[0].rewritten == "cmyk"
    assert np.abs(rgb(content).astype(int) - np.asarray(drawn())).mean() < 3
    assert not checked(content)[1].info


@pytest.mark.parametrize("mode", ["LAB", "YCbCr"])
def test_other_colour_spaces_become_rgb(mode: str):
    grey = Image.new("RGB", (40, 40), (128, 128, 128)).convert("YCbCr")
    image = grey if mode == "YCbCr" else Image.new("LAB", (40, 40), (137, 128, 128))
    content = encoded(image, "TIFF")
    assert checked(content)[0].rewritten == mode.lower()
    assert np.abs(rgb(content).astype(int) - 128).max() <= 10


@pytest.mark.parametrize("format", ["PNG", "TIFF"])
def test_16_bit_grey_is_scaled(format: str):
    """`convert("RGB")` alone gives white for everything above 255."""
    levels = np.arange(0, 65_536, 16, dtype=np.uint16).reshape(64, 64)
    levels[-1, -1] = 65_535
    content = encoded(Image.fromarray(levels), format)
    assert checked(content)[0].rewritten == "16 bit"
    assert np.array_equal(rgb(content)[..., 0], levels // 256)


@pytest.mark.parametrize(("greatest", "format"), [(65_535, "PPM"), (1_023, "PPM"), (65_535, "JPEG2000")])
def test_16_bit_grey_is_scaled_by_the_range_that_the_file_gives(greatest: int, format: str):
    """A dark picture stays dark; Pillow scales a grey map of any range, and JPEG 2000, to 16 bits."""
    levels = (np.arange(64 * 64).reshape(64, 64) % (greatest // 8)).astype(np.uint16)
    if format == "PPM":
        content = b"P5 64 64 %d\n" % greatest + levels.astype(">u2").tobytes()
    else:
        content = encoded(Image.fromarray(levels), "JPEG2000")
    assert checked(content)[0].rewritten == f"{format}, 16 bit"
    assert np.abs(rgb(content)[..., 0].astype(int) - levels.astype(int) * 256 // (greatest + 1)).max() <= 1


@pytest.mark.parametrize("type", [np.int32, np.float32])
def test_32_bit_grey_is_stretched(type: type):
    """Such pictures do not give their range."""
    levels = np.linspace(-1000, 3_000_000, 4096).reshape(64, 64).astype(type)
    content = encoded(Image.fromarray(levels), "TIFF")
    assert checked(content)[0].rewritten == "32 bit"
    pixels = rgb(content)
    assert (pixels[0, 0, 0], pixels[-1, -1, 0]) == (0, 255)
    assert (np.diff(pixels[..., 0].ravel().astype(int)) >= 0).all()


def test_grey_levels_that_are_not_numbers_are_refused():
    levels = np.full((64, 64), np.nan, np.float32)
    assert check_picture(encoded(Image.fromarray(levels), "TIFF"), LIMITS).reason == "undecodable"


@given(
    st.sampled_from(sorted(PLAIN)),
    st.lists(st.tuples(st.integers(0, 4000), st.binary(max_size=8)), min_size=1, max_size=6),
    st.integers(0, 4000),
)
def test_hostile_bytes_raise_nothing(format: str, patches: list[tuple[int, bytes]], end: int):
    """Bytes are changed and cut anywhere; the verdict is the same each time."""
    content = bytearray(PLAIN[format])
    for place, patch in patches:
        content[place : place + len(patch)] = patch
    found = check_picture(bytes(content[: end or None]), LIMITS)
    again = check_picture(bytes(content[: end or None]), LIMITS)
    if isinstance(found, Unusable):
        assert found == again
        assert found.reason in REASONS
        assert " at 0x" not in found.detail
    else:
        assert found[0] == again[0]


def tiff_12_bit(levels: np.ndarray) -> bytes:
    """Return a TIFF of grey levels of 12 bits, packed, two in three bytes; the width is even."""
    high, low = levels[:, ::2].astype(np.uint32), levels[:, 1::2].astype(np.uint32)
    packed = np.stack([high >> 4, (high & 15) << 4 | low >> 8, low & 255], axis=-1).astype(np.uint8).tobytes()
    height, width = levels.shape
    fields = {256: width, 257: height, 258: 12, 259: 1, 262: 1, 273: 200, 277: 1, 278: height, 279: len(packed)}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in fields.items())
    return (b"II*\x00" + struct.pack("<IH", 8, len(fields)) + entries + bytes(4)).ljust(200, b"\x00") + packed


def test_a_12_bit_tiff_is_scaled_by_its_own_depth():
    """Divided by 256 it was nearly black; a dark picture stays dark, because the file gives its depth."""
    levels = np.arange(64 * 64, dtype=np.uint16).reshape(64, 64)
    content = tiff_12_bit(levels)
    assert checked(content)[0].rewritten == "12 bit"
    assert np.array_equal(rgb(content)[..., 0], levels // 16)
    assert np.array_equal(rgb(tiff_12_bit(levels // 16))[..., 0], levels // 256)


@pytest.mark.parametrize("format", ["PNG", "TIFF"])
@pytest.mark.parametrize(
    ("greatest", "depth"), [(0, 8), (255, 8), (256, 10), (1023, 10), (4095, 12), (4096, 14), (16_384, 16)]
)
def test_16_bit_greys_of_a_narrow_range_keep_it(format: str, greatest: int, depth: int):
    """16-bit levels that use fewer bits, as cameras and microscopes write them."""
    levels = np.linspace(0, greatest, 40 * 40).astype(np.uint16).reshape(40, 40)
    content = encoded(Image.fromarray(levels), format)
    assert checked(content)[0].rewritten == f"{depth} bit"
    assert np.array_equal(rgb(content)[..., 0], levels >> (depth - 8))


@pytest.mark.parametrize(("said", "depth"), [(4095, 12), (1023, 12), (0, 12), (65_535, 12), (16_383, 14)])
def test_a_tiff_may_say_its_greatest_level(said: int, depth: int):
    """A value below its real levels is ignored; 65535 is the default, and means nothing."""
    levels = np.linspace(0, 4000, 40 * 40).astype(np.uint16).reshape(40, 40)
    content = encoded(Image.fromarray(levels), "TIFF", tiffinfo={341: said})
    assert checked(content)[0].rewritten == f"{depth} bit"
    assert np.array_equal(rgb(content)[..., 0], levels >> (depth - 8))
