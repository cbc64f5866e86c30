"""Conversations of pairs, in a form of ms-swift: {"conversation": [{"human": …, "assistant": …}, …]}."""

from typing import Protocol

import msgspec

from vlmflow.config.raw_forms import RawForm
from vlmflow.rows.raw_text import Reading, rounds
from vlmflow.rows.rejects import Reject


class Pair(msgspec.Struct, gc=False):
    """A question and its answer."""

    human: str
    assistant: str


class Row(Protocol):
    """The keys of a row."""

    conversation: list[Pair]
    system: str | None


def read(raw: Row, prompt: str | None) -> Reading | Reject:
    """Return the turns of a row."""
    if not raw.conversation:
        return Reject("unbalanced_turns", "conversation has no turns")
    return rounds(((pair.human, pair.assistant) for pair in raw.conversation), raw.system)


FORM = RawForm(
    kinds=("pairs",),
    row='`{"conversation": [{"human": …, "assistant": …}, …]}`; also `system`',
    content=Row,
    read=read,
    turns="conversation",
    rounds=True,
)
