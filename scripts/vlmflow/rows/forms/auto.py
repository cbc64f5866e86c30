"""Rows of a form that is found in the data themselves: see `raw.found_kind`."""

from typing import Protocol

from vlmflow.config.key_meanings import HISTORY, OF_CONVERSATIONS
from vlmflow.config.raw_forms import RawForm


class Row(Protocol):
    """No key is known before the first rows are read."""


FORM = RawForm(
    kinds=("auto",),
    row="found in the first rows; the log says which kind it is, and why",
    content=Row,
    meanings=OF_CONVERSATIONS | HISTORY,
    pictures_in_turns=True,
)
