"""Reads what a raw row of any form names: its pictures and its source."""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import msgspec

from vlmflow.config.raw_forms import ANY_ROW, picture_keys
from vlmflow.raw.row_keys import with_own_keys

SOURCE = re.compile(r"[^\x00-\x1f\x7f]{1,200}")
UNKNOWN_SOURCE = "unknown"


class Named(NamedTuple):
    """The pictures that a raw row names, and its source."""

    pictures: list[str]
    source: str


class _NamedInRow(Protocol):
    """What is read from a row: the keys of ANY_ROW."""

    image: str | None
    images: list[str] | None
    source: Any


def pictures_of(image: str | None, images: Sequence[str] | None) -> list[str]:
    """Return the pictures that a row names under `image` and `images`; one in both counts once."""
    pictures = [name for name in images if name] if images else []
    return [image, *pictures] if image and image not in pictures else pictures


def source_of(named: Any, pictures: Sequence[str]) -> str:
    """Return a row's source: the text that it names, else the first folder of its first picture's path.

    Return UNKNOWN_SOURCE if there is neither, or if it has control characters or a wrong length (see SOURCE).
    """
    if isinstance(named, str):
        return _source_name(named)
    if pictures and (slash := pictures[0].find("/")) > 0:
        return _source_name(pictures[0][:slash])
    return UNKNOWN_SOURCE


@lru_cache(maxsize=1024)
def _source_name(named: str) -> str:
    return named if SOURCE.fullmatch(named) else UNKNOWN_SOURCE


def reader(names: Mapping[str, str]) -> Callable[[bytes], Named | None]:
    """Return the function that reads a raw row's pictures and source, and nothing else of it.

    names: the names of `image`, `images` and `source` in the file; one that is not there is not read.

    The function returns None for a row that is not a JSON object, or in which these keys have a wrong type.
    """
    read = [(key, holds, None) for key, holds in ANY_ROW.items() if key in names]
    absent = dict.fromkeys(ANY_ROW.keys() - names.keys())
    made: Any = msgspec.defstruct("NamedInRow", read, rename=dict(names), namespace=absent)
    decode: Callable[[bytes], _NamedInRow] = msgspec.json.Decoder(made).decode
    own = picture_keys(names)
    in_any_case = re.compile(b'"(?:%s)"' % b"|".join(re.escape(name.encode()) for name in own), re.IGNORECASE)

    def named(row: bytes) -> Named | None:
        try:
            found = decode(row)
            pictures = pictures_of(found.image, found.images)
            if not pictures and in_any_case.search(row):
                found = decode(with_own_keys(row, own))
                pictures = pictures_of(found.image, found.images)
        except (ValueError, RecursionError):
            return None
        return Named(pictures, source_of(found.source, pictures))

    return named
