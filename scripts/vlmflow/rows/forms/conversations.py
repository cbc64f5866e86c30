"""Conversations in the form of ShareGPT and LLaVA: {"conversations": [{"from": "human", "value": …}, …]}.

Volcano's rows have this form too (https://huggingface.co/datasets/kaist-ai/volcano-train).
"""

from typing import Any, Literal, Protocol

import msgspec

from vlmflow.config.raw_forms import RawForm
from vlmflow.rows.chat import PlainTurn, Reject
from vlmflow.rows.raw_messages import SPEAKERS, reading_of
from vlmflow.rows.raw_text import Reading


class Plain(PlainTurn, gc=False):
    """A turn that is a training row's as it is."""

    speaker: Literal["system", "human", "gpt"] = msgspec.field(name="from")


class Row(Protocol):
    """The keys of a row. conversations: as Plain, or decoded JSON. system, tools: see `raw_messages`."""

    conversations: list[dict[str, Any]]
    system: Any
    tools: Any


def read(raw: Row, prompt: str | None) -> Reading | Reject:
    """Return a row's turns, or why it is rejected: also for pictures in turns, which nothing resolves here."""
    turns: list[Any] = raw.conversations
    if turns and type(turns[0]) is Plain:
        if raw.system is raw.tools is msgspec.UNSET:
            return Reading(turns)
        turns = msgspec.to_builtins(turns)
    reading = reading_of("conversations", turns, "from", "value", raw.system, raw.tools)
    if isinstance(reading, Reading) and reading.pictures:  # resolving looks for pictures beside the turns alone
        return Reject("bad_shape", "pictures are named in the turns; this kind reads them under `image` or `images`")
    return reading


FORM = RawForm(
    kinds=("sharegpt", "volcano"),
    row=(
        '`{"conversations": [{"from": "human", "value": …}, {"from": "gpt", "value": …}]}`; also turns of `system`, '
        "`function_call` and `observation`, or `system` and `tools` beside"
    ),
    content=Row,
    read=read,
    turns="conversations",
    speakers=SPEAKERS,
    fast_types={"conversations": list[Plain]},
    moves_tags=("volcano",),
    feedback=("volcano",),
)
