"""What a conversion makes of a raw row, and its form in converted/DATASET/SPLIT.jsonl."""

import re
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from vlmflow.rows.rejects import Reject
from vlmflow.rows.sharegpt import ShareGptRow, as_line
from vlmflow.rows.unread import Unread


class ConvertedRow(ShareGptRow, gc=False):
    """A ShareGPT row with what the validator needs to know of its raw row.

    raw_row: the number of the raw row, counted from 0; rows from the same raw row follow each other.
    score_field_differs: see `forms.fire.Trajectory`.
    """

    raw_row: int
    score_field_differs: bool = False


class RejectedRow(msgspec.Struct):
    """A raw row that the converter could not use, or leaves out.

    raw_row: its number, counted from 0. detail: for a row left out for its source, that source.
    """

    raw_row: int
    reason: str
    detail: str


@dataclass(frozen=True)
class MakeRows:
    """Makes the training rows of one raw row, given the identity they get, its number and its bytes; never raises.

    unread: counts what it does not read of the rows that it makes.
    """

    make: Callable[[str, int, bytes], list[ConvertedRow] | Reject]
    unread: Unread

    def __call__(self, identity: str, number: int, row: bytes) -> list[ConvertedRow] | Reject:
        """Make the rows of one raw row, or say why there are none."""
        return self.make(identity, number, row)


OWN_FIELDS = re.compile(rb',"raw_row":\d+,"score_field_differs":(?:true|false)}$')
"""What a converted row holds beyond a training row, as the converter writes it: at the end, in this order."""
OWN_FIELDS_LENGTH = 80


def training_line(line: bytes, row: ConvertedRow, picture: str) -> bytes:
    """Give the training row as JSON: the converted line without its own fields, where the picture keeps its name.

    line: the converted row, without its end. picture: the picture's name in the store; empty where it has none.
    """
    images = [picture] if picture else []
    if images == row.images and (own := OWN_FIELDS.search(line, max(0, len(line) - OWN_FIELDS_LENGTH))):
        return line[: own.start()] + b"}\n"
    return as_line(row, images) + b"\n"
