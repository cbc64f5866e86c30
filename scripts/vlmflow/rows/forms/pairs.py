"""Conversations of pairs, in a form of ms-swift: {"conversation": [{"human": …, "assistant": …}, …]}."""

from typing import Protocol

import msgspec

from vlmflow.config.raw_forms import RawForm
from vlmflow.rows.chat import Reject
from vlmflow.rows.raw_text import Reading, rounds


class Pair(msgspec.Struct, gc=False):
    """A question and its answer."""

    human: str
    assistant: str


class Row(Protocol):
    """A raw row. conversation: its rounds, in their order."""

    conversation: list[Pair]
    system: str | None


def read(raw: Row, prompt: str | None) -> Reading | Reject:
    """Return two turns for each pair; a row without pairs is rejected."""
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
