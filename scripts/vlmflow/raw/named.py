"""Reads what a raw row of any form names: its pictures and its source."""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec

from vlmflow.config.raw_forms import ANY_ROW, PictureCell, PictureNames, RawForm, form_of, may_be_null, picture_keys
from vlmflow.config.row_settings import RowChoice, Take
from vlmflow.raw.embedded import EMBEDDED, FOLDER, path_of
from vlmflow.raw.rewritten import rewriter
from vlmflow.raw.row_keys import with_own_keys

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
    named = [(one.bytes or one.path) if isinstance(one, PictureCell) else one for one in pictures]
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
    any_of = b"|".join(re.escape(name.encode()) for name in own)
    in_other_case = re.compile(b'"(?!(?:%s)")(?i:%s)"' % (any_of, any_of))
    in_turns = _in_turns(form, names, choice.take) if form and form.pictures_in_turns else None
    with_frames = rewriter(form, names, choice.take, choice.frames) if form and choice.frames else None
    has_source = form is not None and form.rounds

    def named(row: bytes) -> Named | None:
        try:
            row = with_frames(row) if with_frames else row
            found = decode(row)
            pictures = pictures_of(found.image, found.images)
            if in_other_case.search(row):
                found = decode(with_own_keys(row, own))
                pictures = pictures_of(found.image, found.images)
            said = in_turns(row) if in_turns and (has_source or not pictures) else NOTHING
            pictures = pictures or said.pictures
        except (ValueError, RecursionError):
            return None
        return Named(pictures, source_of(said.source or found.source, pictures))

    return named


def _in_turns(form: RawForm, names: Mapping[str, str], take: Take) -> Callable[[bytes], Named]:
    """Return the function that reads what a row's turns name, as the conversion does; "" if they have no source."""
    decode, read = msgspec.json.Decoder(raw_type(form.all_keys, names)).decode, form.read
    rewritten = rewriter(form, names, take)
    assert read is not None, "only a form with `read` has pictures in turns"

    def said(row: bytes) -> Named:
        if take:
            row = rewritten(row)
        try:
            found = read(decode(row), None)
        except msgspec.ValidationError:
            if (again := rewritten(row)) is row:
                raise
            found = read(decode(again), None)
        return Named(list(getattr(found, "pictures", ())), getattr(found, "source", None) or "")  # a Reject has none

    return said


def raw_type(keys: Mapping[str, Any], names: Mapping[str, str]) -> type[msgspec.Struct]:
    """Return the type of a raw row, with the keys' names in the file.

    An attribute whose key is missing is UNSET; one whose key is not read is None.

    keys: the types by key. names: the name of each key in the file; a missing key is not read.
    """
    read = sorted((key for key in keys if key in names), key=lambda key: may_be_null(keys[key]))
    typed = [(key, keys[key], msgspec.UNSET) if may_be_null(keys[key]) else (key, keys[key]) for key in read]
    absent = dict.fromkeys((ANY_ROW.keys() | keys.keys()) - names.keys())
    return msgspec.defstruct("RawRow", typed, rename=dict(names), namespace=absent, gc=False)
