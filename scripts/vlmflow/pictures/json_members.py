"""Where the members of a JSON object stand in its text, so that values can change and all other bytes stay."""

import json
from collections.abc import Iterator
from pathlib import Path

from vlmflow.core.errors import VlmflowError

ADVICE = "take the model with the files that its owner published"

Members = dict[str, tuple[int, int]]
"""Where the values of an object's keys begin and end in a text."""


def read_members(file: Path) -> tuple[str, Members]:
    """Return the text of a JSON file, and the members of its object; raises VlmflowError as `members_of`."""
    try:
        text = file.read_bytes().decode()
        json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise VlmflowError(f"{file}: {error}", ADVICE) from None
    return text, members_of(file, text, _blank(text, 0))


def members_of(file: Path, text: str, start: int) -> Members:
    """Return the members of the object that begins at `start` of a valid JSON text.

    Raises VlmflowError, with the file's name, if no object begins there, or it names a key twice.
    """
    if text[start] != "{":
        raise VlmflowError(
            f"{file}: an object must begin at character {start + 1}, not {text[start : start + 9]!r}", ADVICE
        )
    found: Members = {}
    for key, begin, end in _pairs(text, start):
        if key in found:
            raise VlmflowError(f"{file}: names the key {key!r} twice, so readers may take different values", ADVICE)
        found[key] = begin, end
    return found


def _pairs(text: str, start: int) -> Iterator[tuple[str, int, int]]:
    value = json.JSONDecoder().raw_decode
    at = _blank(text, start + 1)
    while text[at] != "}":
        key, at = value(text, at)
        begin = _blank(text, _blank(text, at) + 1)
        _, end = value(text, begin)
        yield key, begin, end
        at = _blank(text, end)
        if text[at] == ",":
            at = _blank(text, at + 1)


def _blank(text: str, at: int) -> int:
    """Return the place of the next character that is no JSON white space."""
    while text[at] in " \t\n\r":
        at += 1
    return at
