"""Rounds about the pictures of a row, as in the_cauldron, FineVision and Docmatix: {"images": […], "texts": […]}."""

from typing import Protocol

import msgspec
from msgspec import UNSET, UnsetType

from vlmflow.config.raw_forms import RawForm
from vlmflow.rows.chat import Reject
from vlmflow.rows.raw_text import Reading, rounds


class Round(msgspec.Struct, gc=False):
    """A question and its answer. source: where they are from."""

    user: str
    assistant: str
    source: str | UnsetType | None = UNSET


class Row(Protocol):
    """A raw row. texts: its rounds, in their order."""

    texts: list[Round]


def read(raw: Row, prompt: str | None) -> Reading | Reject:
    """Return the turns of a row, with the source of the first round."""
    if not raw.texts:
        return Reject("unbalanced_turns", "texts has no turns")
    return rounds(((pair.user, pair.assistant) for pair in raw.texts), source=raw.texts[0].source)


FORM = RawForm(
    kinds=("texts",),
    row=(
        '`{"texts": [{"user": …, "assistant": …, "source": …}, …]}`, the rounds of one conversation; the first one\'s '
        "`source`, which may be missing, is the row's"
    ),
    content=Row,
    read=read,
    turns="texts",
    rounds=True,
    pictures_in_turns=True,
)
