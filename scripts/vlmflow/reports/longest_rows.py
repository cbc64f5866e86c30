"""The longest rows of a run, with lengths and questions, for the pages that name them."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from vlmflow.core.account import MAKE_AGAIN
from vlmflow.core.errors import VlmflowError
from vlmflow.lengths.accounts import SplitLengths
from vlmflow.rows.chat import said, without_tags
from vlmflow.rows.sharegpt import ShareGptRow

QUESTION_SHOWN = 160
"""Characters."""


@dataclass(frozen=True)
class LongRow:
    """One row. question: its beginning; "" if the page's stage does not read the rows.

    turns: their number without a system prompt. source: as in the raw row.
    """

    split: str
    id: str
    tokens: int
    picture_tokens: int
    question: str = ""
    turns: int = 0
    source: str = ""


def long_rows(split: str, lengths: SplitLengths) -> list[LongRow]:
    """Return the longest rows of an account, without their questions."""
    return [LongRow(split, row.id, row.tokens, row.picture_tokens) for row in lengths.longest]


def with_looks(rows: Iterable[LongRow], file: Path, places: Mapping[str, tuple[int, int]]) -> list[LongRow]:
    """Return the rows of one data file with their questions.

    places: the bytes of a row in the file, from start to end (exclusive), by its id.

    Raises VlmflowError if there is no row at its place.
    """
    return [_with_look(row, file, *places[row.id]) for row in rows]


def _with_look(row: LongRow, file: Path, start: int, end: int) -> LongRow:
    with file.open("rb") as opened:
        line = os.pread(opened.fileno(), end - start, start)
    try:
        found = msgspec.json.decode(line, type=ShareGptRow)
    except ValueError as error:
        raise VlmflowError(f"{file}, bytes {start:,} to {end:,}: {error}", MAKE_AGAIN) from None
    texts = said(found.conversations)
    asked = " ".join(without_tags(texts[0]).split()) if texts else ""
    question = asked if len(asked) <= QUESTION_SHOWN else f"{asked[:QUESTION_SHOWN]} …"
    return replace(row, question=question, turns=len(texts), source=found.source)
