"""Messages in the form of OpenAI's chat API: {"messages": [{"role": "user", "content": …}, …]}."""

from typing import Protocol

import msgspec

from vlmflow.config.raw_forms import RawForm
from vlmflow.rows.chat import ROLES, Speaker
from vlmflow.rows.raw_text import Reading, spoken
from vlmflow.rows.rejects import Reject

SPEAKERS: dict[str, Speaker] = {ROLES[speaker]: speaker for speaker in ("human", "gpt", "system")}


class Message(msgspec.Struct, gc=False):
    """A turn. role: the speaker."""

    speaker: str = msgspec.field(name="role")
    text: str = msgspec.field(name="content")


class Row(Protocol):
    """The keys of a row."""

    messages: list[Message]


def read(raw: Row, prompt: str | None) -> Reading | Reject:
    """Return the turns of a row."""
    turns = spoken("messages", raw.messages, SPEAKERS)
    return turns if isinstance(turns, Reject) else Reading(turns)


FORM = RawForm(
    kinds=("messages",),
    row=(
        '`{"messages": [{"role": "user", "content": …}, {"role": "assistant", "content": …}]}`; '
        "a turn of `system` may come first; or such turns in two lists, `prompt` and `completion`"
    ),
    content=Row,
    read=read,
    turns="messages",
    speakers=SPEAKERS,
    joins=("prompt", "completion"),
)
