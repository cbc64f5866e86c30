"""Pictures in the data themselves, as bytes or as base64: each has a name by its content.

With this name it goes through the workflow like a picture in a file. `resolve_images` writes it to a file of that name,
in a folder that is the first picture root; each picture is there once.
"""

import base64
import binascii
import hashlib
import re
from collections.abc import Container, Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex

import msgspec

from vlmflow.core.files import naming

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
    found = DATA_URL.match(text)
    if found is None and text[:5].lower() == "data:":
        raise ValueError(f"a picture's data URL begins with {text[:40]!r}, not with data:TYPE;base64,")
    encoded = text[found.end() :] if found else text
    try:
        return BASE64_DECODER(f'"{encoded}"')
    except msgspec.MsgspecError:
        pass  # wrapped lines, or without padding
    encoded = "".join(encoded.split())
    try:
        return base64.b64decode(encoded + "=" * (-len(encoded) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"a picture that begins with {text[:40]!r} is not base64: {error}") from None
