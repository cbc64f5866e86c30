"""Messages in the form of chat APIs: {"messages": [{"role": "user", "content": …}, …]}."""

from typing import Any, Literal, Protocol

import msgspec

from vlmflow.config.raw_forms import RawForm
from vlmflow.rows.chat import IMAGE_TAG, Reject, Turn
from vlmflow.rows.raw_messages import SPEAKERS, reading_of
from vlmflow.rows.raw_text import Reading, is_path


class TextPart(msgspec.Struct, tag_field="type", tag="text", forbid_unknown_fields=True, gc=False):
    """A text in a turn of parts."""

    text: str


class ImagePart(msgspec.Struct, tag_field="type", tag="image", forbid_unknown_fields=True, gc=False):
    """A picture in a turn of parts. image: its path."""

    image: str


class Plain(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """A turn that is a text, or of such parts. role: the speaker."""

    role: Literal["user", "assistant", "system"]
    content: str | list[TextPart | ImagePart]


class Row(Protocol):
    """The keys of a row. messages: as Plain, or decoded JSON. system, tools, functions: see `raw_messages`."""

    messages: list[dict[str, Any]]
    system: Any
    tools: Any
    functions: Any


def read(raw: Row, prompt: str | None) -> Reading | Reject:
    """Return a row's turns, its tools and the pictures in its turns, or why it is rejected."""
    turns: list[Any] = raw.messages
    if turns and type(turns[0]) is Plain:
        if raw.system is raw.tools is raw.functions is msgspec.UNSET and (reading := _plain(turns)):
            return reading
        turns = msgspec.to_builtins(turns)
    return reading_of("messages", turns, "role", "content", raw.system, raw.tools, raw.functions)


def _plain(turns: list[Plain]) -> Reading | None:
    """Return what plain turns say; None if a picture may be more than a path, or a part has no text."""
    made: list[Turn] = []
    pictures: list[str] = []
    for turn in turns:
        content = turn.content
        if type(content) is list:
            texts = []
            for part in content:
                if type(part) is TextPart:
                    texts.append(part.text)
                elif is_path(part.image):  # type: ignore[union-attr]  # it is the other kind of part
                    texts.append(IMAGE_TAG)
                    pictures.append(part.image)  # type: ignore[union-attr]
                else:
                    return None
            content = "".join(texts)
        made.append(Turn(SPEAKERS[turn.role], content))  # type: ignore[arg-type]  # it is a text now
    return Reading(made, pictures)


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
    fast_types={"messages": list[Plain]},
    pictures_in_turns=True,
)
