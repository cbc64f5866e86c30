"""What chats consist of, as their makers write it (see `raw_messages`): parts, pictures, calls, declarations of tools.

place: where something is in a row, for messages. All functions raise BadChat for what is not as any maker writes it.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec
from msgspec import UNSET

from vlmflow.config.key_meanings import is_given
from vlmflow.raw.embedded import SHORTEST, name_of, path_of
from vlmflow.raw.row_keys import key_fault
from vlmflow.rows.rejects import Reject
from vlmflow.rows.tools import tools_text

TEXT_PARTS = dict.fromkeys(("text", "input_text", "output_text"), ("text", "value", "content"))
THOUGHT_PARTS = dict.fromkeys(("thinking", "reasoning"), ("thinking", "reasoning", "text", "value", "content"))
PICTURE_KEYS = ("image", "image_url", "image_path", "path", "url", "base64", "value", "content", "source")
PICTURE_PARTS = dict.fromkeys(("image", "image_url", "image_path", "input_image"), PICTURE_KEYS)
CALL_PARTS = {"tool_use": ("id", "name", "input"), "tool_call": ("value",)}
RESPONSE_PARTS = {"tool_result": ("tool_use_id", "content")}
PARTS: dict[str, tuple[str, ...]] = TEXT_PARTS | THOUGHT_PARTS | PICTURE_PARTS | CALL_PARTS | RESPONSE_PARTS
"""The kinds of parts, with the keys that are read of them besides `type`."""

INNER_KEYS = ("bytes", "data", "url", "path")
"""The keys of an object that stands for a picture; the first that is given counts."""

AS_BASE64 = ("bytes", "base64", "data")
"""The keys that hold a picture itself, as base64."""


class BadChat(Exception):
    """Why a row cannot be used. reason: a key of rejects.REASONS. detail: for people."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reject = Reject(reason, detail)


def text_of(part: Mapping[str, Any], keys: Sequence[str], place: str) -> str:
    """Return the text of a part, which has just one of these keys."""
    given = [text for key in keys if type(text := part.get(key)) is str]
    if len(given) != 1:
        raise BadChat("bad_shape", f"{place}: a part of type {part.get('type')} has not one text ({', '.join(keys)})")
    return given[0]


def pictures_of_part(part: Mapping[str, Any], keys: Sequence[str], place: str) -> list[str]:
    """Return the name of a part's picture; [] if it is named beside the turns."""
    given = [(key, held) for key in keys if (held := part.get(key)) is not None]
    if not given:
        return []
    (key, held), *others = given
    if type(held) is dict:
        key, held = next(((name, value) for name in INNER_KEYS if (value := held.get(name))), (key, None))
    if others or type(held) is not str or not held:
        raise BadChat("bad_shape", f"{place}: not one picture, as a path, an address or base64 ({', '.join(keys)})")
    try:
        return [name_of(held) if key in AS_BASE64 else path_of(held)]
    except ValueError as error:
        raise BadChat("bad_picture", f"{place}: {error}") from None


def is_path(name: str) -> bool:
    """Return whether a picture's name surely is a path as it is: no base64, no data URL, and no file URL."""
    return 0 < len(name) <= SHORTEST and name[4:5] != ":"


def calls_in(held: Any, place: str) -> list[Any]:
    """Return calls as a list. held: one or a list, maybe as JSON."""
    if type(held) is str:
        held = decoded(held, "bad_call", f"{place}: the call")
    return held if type(held) is list else [held]


def declared(held: Iterable[Any]) -> str:
    """Return the declarations of a row in the form of rows; "" if there are none. held: what its keys of tools have."""
    given = [tools for tools in held if tools and is_given(tools)]
    if not given:
        return ""
    if len(given) > 1:
        raise BadChat("bad_tools", "tools are declared under two keys")
    return _in_form(given[0] if type(given[0]) is str else msgspec.json.encode(given[0]).decode())


@lru_cache(maxsize=16)
def _in_form(text: str) -> str:
    """Return declarations in the form of rows. text: as JSON; most rows have those of the row before."""
    tools = decoded(text, "bad_tools", "tools")
    listed = tools if type(tools) is list else [tools]
    return tools_text([_declaration(number, one) for number, one in enumerate(listed)])


def _declaration(number: int, held: Any) -> dict[str, Any]:
    """Return a declaration in OpenAI's form. held: in this form, or a function alone, or in Anthropic's."""
    if type(held) is str:
        held = decoded(held, "bad_tools", f"tools[{number}]")
    if type(held) is not dict or not isinstance(held.get("name", held.get("function")), str | dict):
        raise BadChat("bad_tools", f"tools[{number}] declares no function")
    if "function" in held:
        return held
    function = {("parameters" if key == "input_schema" else key): value for key, value in held.items() if key != "type"}
    return {"type": "function", "function": function}


def decoded(text: str, reason: str, what: str) -> Any:
    """Return decoded JSON. reason: that of the reject if it is none, or has a key twice. what: names it, for people."""
    try:
        value = msgspec.json.decode(text.encode())
    except (ValueError, RecursionError) as error:
        raise BadChat(reason, f"{what}: {error}") from None
    if fault := key_fault(text.encode()):
        raise BadChat(reason, f"{what}: {fault}")
    return value


def kind_of(value: Any) -> str:
    """Return what a JSON value is, for people."""
    if value is None or value is UNSET:
        return "null"
    names = {bool: "a boolean", str: "a text", list: "a list", dict: "an object"}
    return names.get(type(value), "a number")
