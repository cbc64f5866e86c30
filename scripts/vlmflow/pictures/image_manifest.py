"""The image manifest of a split: for every path that its rows name, its picture, or why there is none."""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, overload

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


Entry = TypeVar("Entry", PictureEntry, KnownPicture)


@overload
def read_picture_manifest(manifest: Path) -> Iterator[PictureEntry]: ...
@overload
def read_picture_manifest(manifest: Path, form: type[Entry]) -> Iterator[Entry]: ...
def read_picture_manifest(manifest: Path, form: type[Any] = PictureEntry) -> Iterator[Any]:
    """Return the entries of an image manifest, in the order in which the rows first name the paths.

    form: the type of the entries; only its fields are read.

    Raises VlmflowError if the file is missing or a line is not an entry.
    """
    return read_lines(manifest, form)


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
