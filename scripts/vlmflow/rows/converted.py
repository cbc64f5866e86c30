"""The results of converting a raw row, and their form in converted/DATASET/SPLIT.jsonl."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from vlmflow.config.row_settings import RowLimits
from vlmflow.rows.chat import Turn
from vlmflow.rows.rejects import Reject
from vlmflow.rows.sharegpt import ShareGptRow, as_line
from vlmflow.rows.trajectories import TrainingForm
from vlmflow.rows.unread import Unread


class ConvertedRow(ShareGptRow, kw_only=True, gc=False):
    """A ShareGPT row with the facts about its raw row that validation needs.

    raw_row: the number of the raw row, counted from 0; rows from the same raw row are consecutive.
    score_field_differs: see `trajectories.Trajectory`.
    """

    raw_row: int
    score_field_differs: bool


class RejectedRow(msgspec.Struct):
    """A raw row that is unusable or left out.

    raw_row: its number, counted from 0. reason: a key of `rejects.REASONS`. detail: the exact cause, for people; for
    `source_left_out` the row's source.
    """

    raw_row: int
    reason: str
    detail: str


RowsOf = Callable[[str, int, Any, int], list[ConvertedRow] | Reject]
"""Takes the id for the training rows, the number of the raw row, the decoded row, and its size in bytes; returns the
training rows, or why there are none. It counts what it changes of the texts of usable rows."""


@dataclass(frozen=True)
class HowToConvert:
    """How raw rows become training rows: settings of the data set, and who counts what is not read or is changed.

    modality: "image" or "text", so that rows of the other one are left out; None for all. prompt: the question of
    every row, in a form with one prompt. system: the first turn of a conversation that has none, if any. limits,
    trajectories: for a form with several training rows of a raw one.
    """

    unread: Unread
    modality: str | None
    prompt: str | None
    system: list[Turn]
    limits: RowLimits
    trajectories: TrainingForm


@dataclass(frozen=True)
class MakeRows:
    """Converts raw rows.

    make: takes the id for the training rows, and the number and the bytes of the raw row; returns the training rows, or
    why there are none. It never raises.
    unread: counts what `make` does not read of the usable rows.
    """

    make: Callable[[str, int, bytes], list[ConvertedRow] | Reject]
    unread: Unread

    def __call__(self, identity: str, number: int, row: bytes) -> list[ConvertedRow] | Reject:
        """Convert one raw row; see `make`."""
        return self.make(identity, number, row)


OWN_FIELDS = re.compile(rb',"raw_row":\d+,"score_field_differs":(?:true|false)}$')
"""The fields that only a converted row has. The converter writes them last, in this order, in at most
OWN_FIELDS_LENGTH bytes."""
OWN_FIELDS_LENGTH = 80


def training_line(line: bytes, row: ConvertedRow, images: list[str]) -> bytes:
    """Return a converted row as a line of a training file: JSON without OWN_FIELDS, and a line feed.

    If the pictures' names stay the same, this only cuts the line.
    line: the JSON of `row`, without a line feed. images: the pictures' names in the store.
    """
    if images == row.images and (own := OWN_FIELDS.search(line, max(0, len(line) - OWN_FIELDS_LENGTH))):
        return line[: own.start()] + b"}\n"
    return as_line(row, images) + b"\n"
