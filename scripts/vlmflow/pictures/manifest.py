"""The image manifest of a split: for every path that its rows name, its picture, or why there is none.

Derives from a row's path the picture's name in the store, and the spellings to search for.

Counts the pictures that a split names: the usable ones, and the rows that the others cost.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path

import msgspec

from vlmflow.core.account import MAKE_AGAIN, read_lines
from vlmflow.core.errors import VlmflowError

REASONS = {
    "path_invalid": "the path is empty, too long, or has characters not allowed in the picture store",
    "path_outside": "the path is outside of the roots, an address, or leaves them by '..' or a link",
    "missing": "no folder of image_roots has a file with this path, in any Unicode form or letter case",
    "ambiguous": "several files differ from the path only in Unicode form or letter case",
    "name_conflict": "a folder of the path is a file in another root: the store cannot hold both",
    "not_a_file": "the path is a folder, a pipe or a device",
    "unreadable": "the file cannot be read (permissions)",
    "too_many_bytes": "the file is larger than max_bytes",
    "unknown_format": "the content is not JPEG, PNG, GIF, WEBP, BMP, TIFF, AVIF, JPEG 2000, PPM, ICO or TGA, whatever "
    "the file's name",
    "too_many_pixels": "width times height is more than max_pixels; found before decoding",
    "too_small": "a side is shorter than min_side",
    "too_elongated": "the sides differ by more than max_aspect",
    "undecodable": "not every pixel can be decoded: the file is cut, damaged or hostile",
}
"""All reasons why a picture cannot be used. Its rows are rejected as `picture_` + reason."""


class Unusable(msgspec.Struct, frozen=True):
    """Why a picture cannot be used.

    reason: a key of REASONS.
    detail: the exact cause, for people; the same on every machine.
    """

    reason: str
    detail: str


class PictureEntry(msgspec.Struct, kw_only=True):
    """One line of the manifest; every line has every key, null where it does not apply.

    path: the path as the rows write it.
    rows: the number of rows that name it.
    reason, detail: why it cannot be used (see Unusable); null if usable.
    name: its name in the data set's picture store, which training rows contain.
    file: its file, absolute, without links. differs: in what the file's name differs from the path: "unicode form", or
    "letter case"; null if it does not.
    format: as detected from the bytes (JPEG, MPO, PNG, GIF, WEBP, BMP, TIFF, AVIF, JPEG2000, PPM, ICO, TGA).
    width, height: in pixels, as training sees the picture: upright.
    mode: Pillow's mode of the original.
    bytes, sha256: size and digest of the original file.
    rewritten: why the store has a plain RGB copy instead; null if it has a link.
    first_frame: true if the file has several frames, pages or sizes, of which only the first (of an icon, the largest)
    is used.
    """

    path: str
    rows: int
    reason: str | None = None
    detail: str | None = None
    name: str | None = None
    file: str | None = None
    differs: str | None = None
    format: str | None = None
    width: int | None = None
    height: int | None = None
    mode: str | None = None
    bytes: int | None = None
    sha256: str | None = None
    rewritten: str | None = None
    first_frame: bool | None = None


class KnownPicture(msgspec.Struct, gc=False):
    """The fields of a manifest's line that show whether the picture is still the same; see PictureEntry."""

    name: str | None
    sha256: str | None
    rewritten: str | None


def read_picture_manifest(manifest: Path) -> Iterator[PictureEntry]:
    """Return the entries of an image manifest, in the order in which the rows first name the paths.

    Raises VlmflowError if the file is missing or a line is not an entry.
    """
    return read_lines(manifest, PictureEntry)


def name_and_digest(entry: PictureEntry | KnownPicture) -> tuple[str, str]:
    """Return the name in the picture store, and the SHA-256, of a usable picture.

    Raises VlmflowError if the manifest has none of them.
    """
    if entry.name is None or entry.sha256 is None:
        raise VlmflowError(f"the image manifest has a picture without name or sha256: {entry}", MAKE_AGAIN)
    return entry.name, entry.sha256


def size_of(entry: PictureEntry) -> tuple[int, int]:
    """Return width and height of a usable picture, in pixels.

    Raises VlmflowError if the manifest does not have them.
    """
    if entry.width is None or entry.height is None:
        raise VlmflowError(f"the image manifest has a picture without width or height: {entry}", MAKE_AGAIN)
    return entry.width, entry.height


def pictures_digest(entries: Mapping[str, KnownPicture]) -> str:
    """Return one SHA-256 over names and contents of usable pictures. entries: by their names in the store."""
    return contents_digest({name: bytes.fromhex(name_and_digest(entry)[1]) for name, entry in entries.items()})


def contents_digest(contents: Mapping[str, bytes]) -> str:
    """Return one SHA-256 over pictures. contents: the SHA-256 of each, by its name in the store."""
    digest = hashlib.sha256()
    for name, content in sorted(contents.items()):
        digest.update(name.encode() + b"\0" + content)
    return digest.hexdigest()


HOUSEKEEPING = ".archives"
"""The folder in the store of fetched pictures for zips' directories, archives during their download, and locks; no
picture's path may begin with it."""

REWRITTEN_SUFFIX = ".rgb.png"
"""The end of a rewritten picture's name in the store; no other name may have it."""

LONGEST_PATH = 500
LONGEST_PART = 255 - len(REWRITTEN_SUFFIX)
"""Bytes. 255 is Linux' NAME_MAX; no data set has longer paths."""

CONTROL_CHARACTER = re.compile(r"[\x00-\x1f\x7f-\x9f]")
ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
DRIVE = re.compile(r"[A-Za-z]:")

COCO = re.compile(
    r"(?P<before>(?:.*/)?)(?P<split>(?:train|val)(?:2014|2017))/"
    r"(?:COCO_(?:train|val)2014_)?(?P<number>[0-9]{1,12})\.jpg",
    re.IGNORECASE,
)
COCO_SPLITS = ("train2017", "val2017", "train2014", "val2014")
"""2014 and 2017 have the same pictures and numbers in different splits."""

BARE_MATHVISTA = re.compile(r"images/[0-9]+\.jpg")


@lru_cache(1 << 10)
def picture_name(path: str) -> str | Unusable:
    r"""Return the store name of a path as rows write it: with `/` for `\`, without empty and `.` parts."""
    parts = [part for part in path.replace("\\", "/").split("/") if part not in ("", ".")]
    name = "/".join(parts)
    outside = (
        (path[:1] in ("/", "\\"), "an absolute path outside of the roots"),
        (ADDRESS.match(path.replace("\\", "/")), "an address"),
        (DRIVE.match(path), "a path with a drive letter"),
        (".." in parts, "a path with '..'"),
    )
    for wrong, reason in outside:
        if wrong:
            return Unusable("path_outside", f"{reason}; pictures are in a root, or named relative to it")
    invalid = (
        (not name, "no file name"),
        (CONTROL_CHARACTER.search(name), "a control character"),
        (not is_text(name), "a character that is not Unicode text"),
        # The trainer (ms-swift, load_file) strips white space, and opens a name with http at its start as an address.
        (name != name.strip(), "white space at the beginning or end"),
        (name.startswith("http"), "begins with 'http', which the trainer takes for an address"),
        (len(_bytes(name)) > LONGEST_PATH, f"longer than {LONGEST_PATH} bytes"),
        (any(len(_bytes(part)) > LONGEST_PART for part in parts), f"a part over {LONGEST_PART} bytes"),
        (any(part.endswith(REWRITTEN_SUFFIX) for part in parts), f"{REWRITTEN_SUFFIX} is reserved"),
        (name.split("/")[0].casefold() == HOUSEKEEPING, f"{HOUSEKEEPING} is reserved"),
    )
    for wrong, reason in invalid:
        if wrong:
            return Unusable("path_invalid", reason)
    return name


@lru_cache(1 << 10)
def spellings(name: str) -> tuple[str, ...]:
    """Return the possible paths of a picture, its own first.

    COCO's pictures are searched by number in 2014 and 2017, with and without the prefix of the 2014 files (FIRE and
    Volcano omit it). Some rows of MathVista omit their folder.
    """
    paths = [name]
    if BARE_MATHVISTA.fullmatch(name):
        paths.append(f"mathvista/{name}")
    if coco := COCO.fullmatch(name):
        number = f"{int(coco['number']):012}.jpg"
        for split in dict.fromkeys((coco["split"].lower(), *COCO_SPLITS)):
            paths.append(f"{coco['before']}{split}/{number}")
            if split.endswith("2014"):
                paths.append(f"{coco['before']}{split}/COCO_{split}_{number}")
    return tuple(dict.fromkeys(paths))


def is_text(name: str) -> bool:
    """Return whether a name can be written as UTF-8; half of a surrogate pair cannot."""
    return name.encode("utf-8", "ignore").decode() == name


def _bytes(name: str) -> bytes:
    return name.encode("utf-8", "replace")


NO_FOLDER = "no folder"
"""The source of pictures whose paths have no folder."""


class PictureCost(msgspec.Struct):
    """The cost of a fault: the pictures that have it, and the rows that name them."""

    pictures: int = 0
    rows: int = 0


class PictureCounts(msgspec.Struct):
    """The pictures of a raw split, in `stats.json`."""

    named: int = 0
    """Different paths that rows name."""

    usable: int = 0

    formats: dict[str, int] = {}
    """The usable pictures by format, as detected from their bytes."""

    rewritten: dict[str, int] = {}
    """The usable pictures that were rewritten, by reason."""

    unusable: dict[str, PictureCost] = {}
    """By reason."""

    missing_by_source: dict[str, PictureCost] = {}
    """The missing ones of these, by the first folder of their path, or NO_FOLDER."""

    other_names: dict[str, int] = {}
    """The usable pictures whose files have other names than the rows give them, by what differs."""

    first_frames: dict[str, int] = {}
    """The usable pictures whose files have several frames, pages or sizes, of which only the first (of an icon, the
    largest) is used, by format."""


class NotChecked(PictureCounts, omit_defaults=True):
    """The counts of a split with unchecked pictures: `{}` in `stats.json`."""


def picture_counts(pictures: Iterable[PictureEntry]) -> PictureCounts:
    """Count the pictures of one manifest; keys are sorted."""
    counts = PictureCounts()
    for picture in pictures:
        counts.named += 1
        if picture.reason is None:
            counts.usable += 1
            _count(counts.formats, picture.format or "unknown")
            if picture.rewritten:
                _count(counts.rewritten, picture.rewritten)
            if picture.differs:
                _count(counts.other_names, picture.differs)
            if picture.first_frame:
                _count(counts.first_frames, picture.format or "unknown")
            continue
        _charge(counts.unusable, picture.reason, picture)
        if picture.reason == "missing":
            folder, slash, _ = picture.path.replace("\\", "/").partition("/")
            _charge(counts.missing_by_source, folder if slash else NO_FOLDER, picture)
    named, usable, *tables = msgspec.structs.astuple(counts)
    return PictureCounts(named, usable, *(dict(sorted(table.items())) for table in tables))


def _count(table: dict[str, int], key: str) -> None:
    table[key] = table.get(key, 0) + 1


def _charge(table: dict[str, PictureCost], key: str, picture: PictureEntry) -> None:
    cost = table.setdefault(key, PictureCost())
    cost.pictures += 1
    cost.rows += picture.rows
