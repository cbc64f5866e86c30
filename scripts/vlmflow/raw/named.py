"""Pictures in the data themselves, as bytes or as base64: each has a name by its content.

With this name it goes through the workflow like a picture in a file. `resolve_images` writes it to a file of that name,
in a folder that is the first picture root; each picture is there once.

Reads what a raw row of any form names: its pictures and its source.
"""

import base64
import binascii
import hashlib
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from secrets import token_hex
from typing import Any, NamedTuple

import msgspec

from vlmflow.config.raw_forms import ANY_ROW, PictureCell, PictureNames, RawForm, form_of, may_be_null, picture_keys
from vlmflow.config.settings import RowChoice, Take
from vlmflow.core.files import naming
from vlmflow.raw.rewritten import rewriter, with_own_keys

ROOT = ".embedded"
"""The root with their files, beside the picture stores of all data sets."""

FOLDER = "embedded"

EMBEDDED = re.compile(rf"{FOLDER}/[0-9a-f]{{2}}/[0-9a-f]{{64}}\.[a-z0-9]+")
"""The names of these pictures."""

SUFFIXES = {b"\xff\xd8\xff": "jpg", b"\x89PNG": "png", b"GIF8": "gif", b"RIFF": "webp", b"BM": "bmp", b"II*\0": "tif"}
"""The ends of names, by the first bytes; only for people, since the content decides what a picture is."""

DATA_URL = re.compile(r"data:[^,]{0,200};base64,", re.IGNORECASE)

BASE64 = re.compile(
    r"(?:/9j/|iVBORw0KGgo|R0lGOD|UklGR|Qk|SUkqA|TU0AK|AAAA.[GWm2]Z0eXBhdm|AAAADGpQICAN)[A-Za-z0-9+/\s]{60,}+={0,2}+\s*+"
)
"""Base64 of JPEG, PNG, GIF, WEBP, BMP, TIFF, AVIF or JPEG 2000 from its first byte on. A path has a dot."""

BASE64_DECODER = msgspec.json.Decoder(bytes).decode
"""Decodes base64 in quotation marks, in half the time of the standard library."""

SHORTEST = 60
"""Any picture is longer, in characters."""

_kept_in: tuple[Path, Container[str] | None, set[str]] | None = None
"""The root, the names of the pictures to write or None for all, and those that are there."""


@contextmanager
def kept_in(root: Path, wanted: Container[str] | None = None) -> Iterator[None]:
    """Write the pictures that this process meets to files below `root`. wanted: the names of those; None for all."""
    global _kept_in
    _kept_in = root, wanted, set()
    try:
        yield
    finally:
        _kept_in = None


def name_of(content: bytes | str) -> str:
    """Return the name of a picture: `embedded/ab/SHA256.png`.

    content: its bytes, or base64, also as a data URL. Raises ValueError if a text is not base64.
    """
    if isinstance(content, str):
        content = _decoded(content)
    digest = hashlib.sha256(content).hexdigest()
    suffix = next((suffix for first, suffix in SUFFIXES.items() if content.startswith(first)), "bin")
    name = f"{FOLDER}/{digest[:2]}/{digest}.{suffix}"
    if _kept_in is not None:
        root, wanted, there = _kept_in
        if name not in there and (wanted is None or name in wanted):
            _keep(content, root / name)
            there.add(name)
    return name


def _keep(content: bytes, file: Path) -> None:
    """Write a picture whole or not at all; one that was damaged or changed since is written again."""
    try:
        if file.stat().st_size == len(content) and file.read_bytes() == content:
            return
    except FileNotFoundError:
        pass
    part = file.with_name(f".{file.name}.{token_hex(8)}")  # other pods have the same process ids
    with naming(part):
        part.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(content)
        part.replace(file)


def path_of(text: str) -> str:
    """Return what a row names as a picture: a path, without `file://`, or the name of a picture that the text is.

    Raises ValueError if a data URL is not base64.
    """
    if text[4:5] == ":":
        return name_of(text) if text[:4].lower() == "data" else text.removeprefix("file://")
    return name_of(text) if len(text) > SHORTEST and BASE64.fullmatch(text) else text


def is_picture(text: str) -> bool:
    """Return whether a text is a picture itself, as base64 or a data URL; nothing is decoded."""
    return bool(DATA_URL.match(text) or (len(text) > SHORTEST and BASE64.fullmatch(text)))


def _decoded(text: str) -> bytes:
    match = DATA_URL.match(text)
    if match is None and text[:5].lower() == "data:":
        raise ValueError(f"a picture's data URL begins with {text[:40]!r}, not with data:TYPE;base64,")
    encoded = text[match.end() :] if match else text
    try:
        return BASE64_DECODER(f'"{encoded}"')
    except msgspec.MsgspecError:
        pass  # wrapped lines, or without padding
    encoded = "".join(encoded.split())
    try:
        return base64.b64decode(encoded + "=" * (-len(encoded) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"a picture that begins with {text[:40]!r} is not base64: {error}") from None


SOURCE = re.compile(r"[^\x00-\x1f\x7f]{1,200}")
UNKNOWN_SOURCE = "unknown"


class Named(NamedTuple):
    """The pictures that a raw row names, and its source."""

    pictures: list[str]
    source: str


NOTHING = Named([], "")


def pictures_of(image: PictureNames, images: PictureNames) -> list[str]:
    """Return the pictures that a row has under `image` and `images`; those in both count once.

    Raises ValueError if a picture in the row itself is not base64, or if one is empty: without bytes
    and path, or beside others.
    """
    if type(image) is str and not images and image[:1] != "[":
        return [path_of(image)] if image else []
    ones, others = _paths(image), _paths(images)
    return others if set(ones).issubset(others) else ones + others


def _paths(cell: PictureNames) -> list[str]:
    if not cell:
        return []
    if isinstance(cell, str) and cell.startswith('["'):  # the cell of a text column
        cell = msgspec.json.decode(cell, type=list[str | PictureCell | None])
    pictures = cell if isinstance(cell, list) else [cell]
    named = [(item.bytes or item.path) if isinstance(item, PictureCell) else item for item in pictures]
    if None in named or (any(named) and not all(named)):
        empty = next(number for number, name in enumerate(named) if not name)
        raise ValueError(f"picture {empty} of {len(named)} is empty")
    return [path_of(name) for name in named if name]


def source_of(named: Any, pictures: Sequence[str]) -> str:
    """Return a row's source: the text that it names, else the first folder of its first picture's path.

    Return UNKNOWN_SOURCE if there is neither, or if it has control characters or a wrong length (see SOURCE).
    """
    if isinstance(named, str):
        return _source_name(named)
    folder, slash, _ = pictures[0].partition("/") if pictures else ("", "", "")
    if not slash or not folder or (folder == FOLDER and EMBEDDED.fullmatch(pictures[0])):
        return UNKNOWN_SOURCE
    return _source_name(folder)


@lru_cache(maxsize=1024)
def _source_name(named: str) -> str:
    return named if SOURCE.fullmatch(named) else UNKNOWN_SOURCE


def reader(choice: RowChoice) -> Callable[[bytes], Named | None]:
    """Return the function that reads a raw row's pictures and source, and nothing else of it.

    The function returns None for a row that is not a JSON object, or in which these keys have a wrong type.
    """
    names, form = choice.names, form_of(choice.kind) if choice.kind else None
    read = [(key, holds, None) for key, holds in ANY_ROW.items() if key in names]
    absent = dict.fromkeys(ANY_ROW.keys() - names.keys())
    made: Any = msgspec.defstruct("NamedInRow", read, rename=dict(names), namespace=absent)
    decode = msgspec.json.Decoder(made).decode
    own = picture_keys(names)
    written = {name.encode() for name in own}
    in_any_case = re.compile(b'"((?i:%s))"' % b"|".join(map(re.escape, sorted(written)))).findall
    in_turns = _in_turns(form, names, choice.take) if form and form.pictures_in_turns else None
    with_frames = rewriter(form, names, choice.take, choice.frames) if form and choice.frames else None
    has_source = form is not None and form.rounds

    def named(row: bytes) -> Named | None:
        try:
            row = with_frames(row) if with_frames else row
            fields = decode(row)
            pictures = pictures_of(fields.image, fields.images)
            if not written.issuperset(in_any_case(row)):
                fields = decode(with_own_keys(row, own))
                pictures = pictures_of(fields.image, fields.images)
            of_turns = in_turns(row) if in_turns and (has_source or not pictures) else NOTHING
            pictures = pictures or of_turns.pictures
        except (ValueError, RecursionError):
            return None
        return Named(pictures, source_of(of_turns.source or fields.source, pictures))

    return named


def _in_turns(form: RawForm, names: Mapping[str, str], take: Take) -> Callable[[bytes], Named]:
    """Return the function that reads what a row's turns name, as the conversion does; "" if they have no source."""
    decode, read = msgspec.json.Decoder(raw_type(form.all_keys, names)).decode, form.read
    rewritten = rewriter(form, names, take)
    assert read is not None, "only a form with `read` has pictures in turns"

    def read_turns(row: bytes) -> Named:
        if take:
            row = rewritten(row)
        try:
            parsed = read(decode(row), None)
        except msgspec.ValidationError:
            if (again := rewritten(row)) is row:
                raise
            parsed = read(decode(again), None)
        return Named(list(getattr(parsed, "pictures", ())), getattr(parsed, "source", None) or "")  # a Reject has none

    return read_turns


def raw_type(keys: Mapping[str, Any], names: Mapping[str, str]) -> type[msgspec.Struct]:
    """Return the type of a raw row, with the keys' names in the file.

    An attribute whose key is missing is UNSET; one whose key is not read is None.

    keys: the types by key. names: the name of each key in the file; a missing key is not read.
    """
    read = sorted((key for key in keys if key in names), key=lambda key: may_be_null(keys[key]))
    typed = [(key, keys[key], msgspec.UNSET) if may_be_null(keys[key]) else (key, keys[key]) for key in read]
    absent = dict.fromkeys((ANY_ROW.keys() | keys.keys()) - names.keys())
    return msgspec.defstruct("RawRow", typed, rename=dict(names), namespace=absent, gc=False)
