"""Rows of a form that is found in the data themselves: see `raw.found_kind`."""

from typing import Protocol

from vlmflow.config.raw_forms import RawForm


class Row(Protocol):
    """No key is known before the first rows are read."""


FORM = RawForm(
    kinds=("auto",),
    row="one of `messages`, `sharegpt` and others, found in the first rows; see below",
    content=Row,
    settings=("take",),
    pictures_in_turns=True,
)
