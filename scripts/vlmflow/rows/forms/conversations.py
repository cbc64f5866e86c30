"""Conversations in the form of ShareGPT and LLaVA: {"conversations": [{"from": "human", "value": …}, …]}.

Volcano's rows have this form too (https://huggingface.co/datasets/kaist-ai/volcano-train).
"""

from typing import Protocol

import msgspec

from vlmflow.config.raw_forms import RawForm
from vlmflow.rows.chat import PlainTurn, Speaker
from vlmflow.rows.raw_text import Reading, spoken
from vlmflow.rows.rejects import Reject

SPEAKERS: dict[str, Speaker] = {"human": "human", "gpt": "gpt", "system": "system"}


class From(msgspec.Struct, gc=False):
    """A turn. from: the speaker."""

    speaker: str = msgspec.field(name="from")
    text: str = msgspec.field(name="value")


class Row(Protocol):
    """The keys of a row."""

    conversations: list[From]


def read(raw: Row, prompt: str | None) -> Reading | Reject:
    """Return the turns of a row."""
    turns = spoken("conversations", raw.conversations, SPEAKERS)
    return turns if isinstance(turns, Reject) else Reading(turns)


FORM = RawForm(
    kinds=("sharegpt", "volcano"),
    row=('`{"conversations": [{"from": "human", "value": …}, {"from": "gpt", "value": …}]}`; `system` may come first'),
    content=Row,
    read=read,
    turns="conversations",
    speakers=SPEAKERS,
    sound={"conversations": list[PlainTurn]},
    moves_tags=("volcano",),
    feedback=("volcano",),
)
