"""The functions that a conversation's assistant may call: their declarations, calls and responses."""

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from vlmflow.rows.chat import Text, Turn
from vlmflow.rows.rejects import Reject


class Function(msgspec.Struct, gc=False):
    """What a declaration says of a function. Its other keys, as description and parameters, are the model's to read."""

    name: Text


class Declaration(msgspec.Struct, gc=False):
    """A declared function, in the form of OpenAI's chat API."""

    function: Function


class Call(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """A call. arguments: by their names."""

    name: Text
    arguments: dict[str, Any]


DECLARATIONS = msgspec.json.Decoder(Annotated[list[Declaration], msgspec.Meta(min_length=1)])
CALL = msgspec.json.Decoder(Call)


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
        except (ValueError, RecursionError) as error:
            return Reject("bad_tools", str(error))
    calls = 0
    for number, turn in enumerate(turns):
        if turn.speaker == "function_call":
            calls += 1
            try:
                name = call_of(turn).name
            except (ValueError, RecursionError) as error:
                return Reject("bad_call", f"turn {number}: {error}")
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
