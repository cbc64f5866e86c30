"""Which rows of a raw split are used, by what each says of its pictures and its source."""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from random import Random
from typing import Any, NamedTuple

import msgspec

from vlmflow.config.data_settings import RowChoice
from vlmflow.raw.split import RawRows

log = logging.getLogger("vlmflow")

LEFT_OUT = ["", "source_left_out", "not_sampled", "text_only", "has_picture"]
"""What `left_out` says of a row, by its number; the first is a row that is used."""

OF_ANOTHER_MODALITY = {"image": "text_only", "text": "has_picture"}
"""Why a row is left out that is not of the modality asked for."""

SOURCE = re.compile(r"[^\x00-\x1f\x7f]{1,200}")
UNKNOWN_SOURCE = "unknown"


class Named(NamedTuple):
    """The pictures that a raw row names, and its source."""

    pictures: list[str]
    source: str


def pictures_of(image: str | None, images: Sequence[str] | None) -> list[str]:
    """Give the pictures that a row names under `image` and `images`; one that stands under both is one."""
    pictures = [name for name in images if name] if images else []
    return [image, *pictures] if image and image not in pictures else pictures


def source_of(named: Any, pictures: Sequence[str]) -> str:
    """Give a row's source: the one that it names, or the first folder of its picture's path, or UNKNOWN_SOURCE."""
    if isinstance(named, str):
        return _source_name(named)
    if pictures and (slash := pictures[0].find("/")) > 0:
        return _source_name(pictures[0][:slash])
    return UNKNOWN_SOURCE


@lru_cache(maxsize=1024)
def _source_name(named: str) -> str:
    return named if SOURCE.fullmatch(named) else UNKNOWN_SOURCE


def reader(names: Mapping[str, str]) -> Callable[[bytes], Named | None]:
    """Give the function that reads what a raw row names, and nothing else of it.

    names: what `image`, `images` and `source` are called in the file; one that is not there is not read.

    It gives None for a row that is no JSON object, or in which these keys hold something else than they should.
    """
    types = {"image": str | None, "images": list[str] | None, "source": Any}
    read = [(key, holds, None) for key, holds in types.items() if key in names]
    absent = dict.fromkeys(types.keys() - names.keys())
    decode = msgspec.json.Decoder(msgspec.defstruct("NamedInRow", read, rename=dict(names), namespace=absent)).decode

    def named(row: bytes) -> Named | None:
        try:
            found = decode(row)
        except (ValueError, RecursionError):
            return None
        pictures = pictures_of(found.image, found.images)
        return Named(pictures, source_of(found.source, pictures))

    return named


def left_out(rows: RawRows, choice: RowChoice) -> Callable[[int], str]:
    """Give the function that says why a row, by its number, is left out: a reason, or "" for one that is used.

    Rows are drawn from those of the modality and the sources asked for. A row of which neither can be told is used:
    what is wrong with it is to be seen. Where all rows of all sources are used, none is looked at: whoever decodes
    them tells their modality. The same files and choice leave out the same rows.
    """
    if choice.sources is None and choice.samples is None:
        return lambda number: ""
    marks = bytearray(len(rows))
    if choice.sources is not None or choice.modality is not None:
        _mark(marks, rows, choice)
    candidates = marks.count(0)
    if choice.samples is not None and choice.samples > candidates:
        log.info(
            "%s: %s rows are asked for (max_samples, or #N behind the address), and there are only %s: all are used",
            rows,
            f"{choice.samples:,}",
            f"{candidates:,}",
        )
    if choice.samples is not None and choice.samples < candidates:
        drawn = bytearray(candidates)
        for place in Random(choice.seed).sample(range(candidates), choice.samples):  # noqa: S311
            drawn[place] = 1
        places = iter(drawn)
        not_sampled = LEFT_OUT.index("not_sampled")
        for number, mark in enumerate(marks):
            if not mark and not next(places):
                marks[number] = not_sampled
    return lambda number: LEFT_OUT[marks[number]]


def _mark(marks: bytearray, rows: RawRows, choice: RowChoice) -> None:
    """Mark the rows of another modality, and those of other sources."""
    of_another = LEFT_OUT.index(OF_ANOTHER_MODALITY.get(choice.modality, ""))
    of_other_source = LEFT_OUT.index("source_left_out")
    has_picture = choice.modality == "image"
    sources = None if choice.sources is None else frozenset(choice.sources)
    for number, named in enumerate(map(reader(choice.names), rows)):
        if named is None:
            continue
        if of_another and bool(named.pictures) != has_picture:
            marks[number] = of_another
        elif sources is not None and named.source not in sources:
            marks[number] = of_other_source
