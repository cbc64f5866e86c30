"""Messages in the form of chat APIs: {"messages": [{"role": "user", "content": …}, …]}."""

from typing import Any, Literal, Protocol

import msgspec

from vlmflow.config.raw_forms import RawForm
from vlmflow.rows.chat import Turn
from vlmflow.rows.raw_messages import SPEAKERS, reading_of
from vlmflow.rows.raw_text import Reading
from vlmflow.rows.rejects import Reject


class Plain(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """A turn that is a text. role: the speaker."""

    role: Literal["user", "assistant", "system"]
    content: str


class Row(Protocol):
    """The keys of a row. messages: as Plain, or decoded JSON. system, tools, functions: see `raw_messages`."""

    messages: list[dict[str, Any]]
    system: Any
    tools: Any
    functions: Any


def read(raw: Row, prompt: str | None) -> Reading | Reject:
    """Return what a row says."""
    turns: list[Any] = raw.messages
    if turns and type(turns[0]) is Plain:
        if raw.system is raw.tools is raw.functions is msgspec.UNSET:
            return Reading([Turn(SPEAKERS[turn.role], turn.content) for turn in turns])
        turns = msgspec.to_builtins(turns)
    return reading_of("messages", turns, "role", "content", raw.system, raw.tools, raw.functions)


FORM = RawForm(
    kinds=("messages",),
    row=(
        '`{"messages": [{"role": "user", "content": …}, {"role": "assistant", "content": …}]}`, as of '
        "OpenAI, Anthropic, Qwen, LLaMA-Factory, axolotl, Oumi and ms-swift; `system`, `tools` or `functions` beside; "
        "or such turns in two lists, `prompt` and `completion`"
    ),
    content=Row,
    read=read,
    turns="messages",
    speakers=SPEAKERS,
    joins=("prompt", "completion"),
    sound={"messages": list[Plain]},
    pictures_in_turns=True,
)
