"""Turns as the messages that servers, chat templates and ms-swift take."""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from vlmflow.core.errors import VlmflowError
from vlmflow.core.printable import counted
from vlmflow.rows.chat import IMAGE_TAG, ROLES, Turn, tags_in
from vlmflow.rows.tools import CALLS, call_of

TRAINED_ROLES = ROLES | {CALLS: "tool_call", "observation": "tool_response"}
"""The names of the speakers in ms-swift (4.6, dataset/preprocessor/core.py)."""


def messages_of(turns: Sequence[Turn], pictures: Sequence[dict[str, Any]] = ()) -> list[dict[str, Any]]:
    """Return turns as messages: each picture tag becomes the next picture, between the texts around it.

    A text of gpt and the calls right behind it are one message. pictures: the parts of messages that stand for the
    row's pictures, in the order of their tags.

    Raises VlmflowError if there are more or fewer pictures than tags.
    """
    tags = tags_in(turns)
    if tags != len(pictures):
        found, given = counted(tags, "picture tag"), counted(len(pictures), "picture")
        raise VlmflowError(f"{found} ({IMAGE_TAG}) but {given}", "give one picture for each tag")
    parts = iter(pictures)
    messages: list[dict[str, Any]] = []
    for turn in turns:
        if turn.speaker != CALLS:
            messages.append({"role": ROLES[turn.speaker], "content": _content(turn.value, parts)})
            continue
        if not messages or messages[-1]["role"] != ROLES[turn.speaker]:
            messages.append({"role": ROLES[turn.speaker], "content": ""})
        call = {"type": "function", "function": msgspec.to_builtins(call_of(turn))}
        messages[-1].setdefault("tool_calls", []).append(call)
    return messages


def trained_messages_of(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """Return turns as the messages of ms-swift: picture tags stay, and answers say whether they are trained."""
    return [
        {"role": TRAINED_ROLES[turn.speaker], "content": turn.value}
        | ({} if turn.loss is UNSET else {"loss": turn.loss})
        for turn in turns
    ]


def _content(text: str, pictures: Iterator[dict[str, Any]]) -> str | list[dict[str, Any]]:
    if IMAGE_TAG not in text:
        return text
    first, *others = text.split(IMAGE_TAG)
    parts: list[dict[str, Any]] = [{"type": "text", "text": first}]
    for other in others:
        parts += [next(pictures), {"type": "text", "text": other}]
    return [part for part in parts if part.get("text") != ""]
