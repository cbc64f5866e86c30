"""The functions that a conversation's assistant may call: their declarations, calls and responses.

Rows have declarations and calls as JSON in one form, that of `tools_text` and `call_text`: the text that a model reads.
ms-swift and chat templates decode and encode them again, so any other text would be trained as one that no check has
seen, a token of the chat in escapes among them.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec

from vlmflow.rows.chat import Text, Turn
from vlmflow.rows.rejects import Reject


class Function(msgspec.Struct, gc=False):
    """What a declaration says of a function. Its other keys, as description and parameters, are the model's to read.

    name: chat templates write it between quotation marks, without escapes.
    """

    name: Annotated[str, msgspec.Meta(pattern=r'^[^"\\\x00-\x1f]+$')]


class Declaration(msgspec.Struct, gc=False):
    """A declared function, in the form of OpenAI's chat API."""

    function: Function


class Call(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """A call. arguments: by their names."""

    name: Text
    arguments: dict[str, Any]


CALLS: Literal["function_call"] = "function_call"
"""The speaker of calls."""

DECLARATIONS = msgspec.json.Decoder(Annotated[list[Declaration], msgspec.Meta(min_length=1)])
CALL = msgspec.json.Decoder(Call)


def call_text(name: str, arguments: Mapping[str, Any]) -> str:
    """Return the text of a turn of function_call. arguments: by their names, JSON values in a row's order."""
    return json_text({"name": name, "arguments": arguments})


def tools_text(declarations: Sequence[Mapping[str, Any]]) -> str:
    """Return a row's `tools`. declarations: in the form of OpenAI's chat API; "" if there are none."""
    return json_text(declarations) if declarations else ""


def as_written(turns: Sequence[Turn]) -> list[str]:
    """Return what a model writes at one time of the assistant, by turn; between them is a line feed."""
    return [f"<tool_call>\n{each.value}\n</tool_call>" if each.speaker == CALLS else each.value for each in turns]


def declarations_of(tools: str) -> list[dict[str, Any]] | None:
    """Return a row's declarations for a chat template or a server, which take None for none."""
    return json.loads(tools) if tools else None


def json_text(value: object) -> str:
    """Return JSON as chat templates (transformers 5, `tojson`) and ms-swift (4.6, HermesAgentTemplate) write it."""
    return json.dumps(value, ensure_ascii=False)


def call_of(turn: Turn) -> Call:
    """Return the call in a turn of function_call. Raises ValueError or RecursionError if it is none."""
    return CALL.decode(turn.value.encode())


def tool_fault(tools: str, turns: Sequence[Turn]) -> Reject | None:
    """Return the first fault of a conversation's declarations and calls, or None.

    tools: the declarations; empty if there are none. turns: in the right order (`chat.FOLLOWS`).
    """
    declared: set[str] = set()
    if tools:
        try:
            declared = {one.function.name for one in DECLARATIONS.decode(tools.encode())}
            written = tools_text(json.loads(tools))
        except (ValueError, RecursionError) as error:
            return Reject("bad_tools", str(error))
        if written != tools:
            return Reject("bad_tools", f"a model would read {_first_difference(written, tools)}")
    calls = 0
    for number, turn in enumerate(turns):
        if turn.speaker == CALLS:
            calls += 1
            try:
                name = call_of(turn).name
                written = call_text(**json.loads(turn.value))
            except (ValueError, RecursionError) as error:
                return Reject("bad_call", f"turn {number}: {error}")
            if written != turn.value:
                return Reject("bad_call", f"turn {number}: a model would read {_first_difference(written, turn.value)}")
            if name not in declared:
                known = ", ".join(sorted(declared)) or "none"
                return Reject("bad_call", f"turn {number} calls {name[:80]!r}; the declared tools are: {known}")
        elif turn.speaker == "observation":
            calls -= 1
            if calls < 0:
                return Reject("bad_call", f"turn {number} is the response to no call")
        else:
            calls = 0
    return None


def _first_difference(read: str, written: str) -> str:
    """Return a part of a text as it is read, and as a row has it, from their first difference on."""
    pairs = enumerate(zip(read, written, strict=False))
    at = next((place for place, (one, other) in pairs if one != other), min(len(read), len(written)))
    return f"{read[at : at + 20]!r}, not {written[at : at + 20]!r}, at character {at}"
