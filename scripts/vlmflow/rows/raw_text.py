"""Makes ids and turns from raw rows, and changes their texts by the rules of docs/data.md.

What chats consist of, as their makers write it (see `raw_messages`): parts, pictures, calls, declarations of tools.

place: where something is in a row, for messages. All functions raise BadChat for what is not as any maker writes it.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple
from zlib import crc32

import msgspec
from msgspec import UNSET, UnsetType

from vlmflow.config.raw_forms import is_given
from vlmflow.raw.named import SHORTEST, name_of, path_of
from vlmflow.raw.rewritten import key_fault
from vlmflow.rows.chat import FIRST_LINE, IMAGE_TAG, Reject, Turn, from_system, tools_text


class UnreadKey(NamedTuple):
    """A key of a raw turn that is not read, as `weight` or `content.train`. answers: whether the assistant speaks."""

    key: str
    value: Any
    answers: bool


class Reading(msgspec.Struct, gc=False):
    """What a raw row says.

    turns: at least one, with the raw texts. pictures: those that the turns themselves name, in the order of their tags.
    tools: the declarations, as in `sharegpt.ShareGptRow`. unread: the keys of turns that are not read, if the form
    looks for them itself. source: that of the turns; None if it is the row's own.
    """

    turns: list[Turn]
    pictures: Sequence[str] = ()
    tools: str = ""
    unread: Sequence[UnreadKey] = ()
    source: str | None = None


def row_id(split: str, number: int, row: bytes) -> str:
    """Return a row's id: the split, the row's number from 0, and a checksum (CRC-32) of its raw bytes.

    The checksum differs if a file of the same name has another row there. SHA-256 would take a fifth of the time of the
    conversion.
    """
    return f"{split}-{number:07}-{crc32(row):08x}"


SINGLE_TURN = "-single"
"""The end of the id of a row that has only the question and the last good attempt of a trajectory."""


RULES = {
    "line_ends": "line ends became line feeds",
    "outer_space": "white space at the end, or blank lines at the beginning, removed",
    "tag_place": "picture tag moved to a line of its own before the question",
    "further_tags": "further picture tags removed: the row has one picture",
    "thought": "reasoning at the beginning of an answer put on lines of its own",
    "joined": "turns in a row of one speaker joined by a line feed",
    "untrained_end": "turns after the last trained answer left out, with their pictures",
}
"""The rules that change texts, for people; docs/data.md describes them."""

NO_RULE: frozenset[str] = frozenset()
LINE_ENDS, OUTER_SPACE, TAG_PLACE, FURTHER_TAGS, THOUGHTS, JOINED, UNTRAINED_END = (frozenset({rule}) for rule in RULES)


def clean(text: str) -> str:
    """Return a text with line feeds as its only line ends, no white space at its end, and no blank lines before it.

    The first line keeps its indent. (A blank line would become one token with the chat form's own line feed.)
    """
    text = _with_line_feeds(text).rstrip()
    indent = len(text) - len(text.lstrip())
    return text[text.rfind("\n", 0, indent) + 1 :]


def cleaned(raw: list[str]) -> tuple[list[str], frozenset[str]]:
    """Return the texts of a row, cleaned, and the rules that changed any."""
    texts = [text.strip() for text in raw]
    if "\r" not in "".join(raw):
        if texts == raw:
            return raw, NO_RULE
        if texts == [text.rstrip() for text in raw]:
            return texts, OUTER_SPACE
    texts, with_line_feeds = list(map(clean, raw)), list(map(_with_line_feeds, raw))
    line_ends = LINE_ENDS if with_line_feeds != raw else NO_RULE
    return texts, line_ends if texts == with_line_feeds else line_ends | OUTER_SPACE


def untagged(question: str) -> tuple[str, frozenset[str]]:
    """Return a cleaned question without picture tags, and the rule that changed it, which may be none.

    A question about a picture needs no tag. The line of a tag before it, or else the white space behind that tag, goes
    with the tag.
    """
    text = question.removeprefix(FIRST_LINE)
    if text is not question and IMAGE_TAG not in text and text[:1].strip():  # nearly all rows with a tag
        return text, NO_RULE
    before, tag, after = question.partition(IMAGE_TAG)
    if not tag:
        return question, NO_RULE
    rest = after.replace(IMAGE_TAG, "")
    if before.strip():
        text = clean(before + rest)
    else:
        between = rest[: len(rest) - len(rest.lstrip())]
        text = clean(rest) if "\n" in between else rest.strip()
    if IMAGE_TAG in after:
        return text, FURTHER_TAGS
    return text, NO_RULE if question == FIRST_LINE + text else TAG_PLACE


def _with_line_feeds(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def question_and_answer(question: str, answer: str) -> Reading:
    """Return the two turns of a row with a single question."""
    return Reading([Turn("human", question), Turn("gpt", answer)])


def rounds(
    pairs: Iterable[tuple[str, str]],
    system: str | UnsetType | None = None,
    history: Sequence[tuple[str, str]] | UnsetType | None = None,
    source: str | UnsetType | None = None,
) -> Reading:
    """Return the turns of a row whose questions stand beside their answers.

    pairs: each question with its answer. system: the system prompt, if it holds anything (`key_meanings.is_given`).
    history: the rounds before, like `pairs`; blank ones count as none. source: see `Reading`.
    """
    turns = from_system(system) if system and is_given(system) else []
    before = [pair for pair in history or () if any(map(str.strip, pair))]
    for question, answer in [*before, *pairs]:
        turns += Turn("human", question), Turn("gpt", answer)
    return Reading(turns, source=source or None)


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


def text_of(part: Mapping[str, Any], keys: Sequence[str], where: str) -> str:
    """Return the text of a part, which has just one of these keys."""
    given = [text for key in keys if type(text := part.get(key)) is str]
    if len(given) != 1:
        raise BadChat("bad_shape", f"{where}: a part of type {part.get('type')} has not one text ({', '.join(keys)})")
    return given[0]


def pictures_of_part(part: Mapping[str, Any], keys: Sequence[str], where: str) -> list[str]:
    """Return the name of a part's picture; [] if it is named beside the turns."""
    given = [(key, held) for key in keys if (held := part.get(key)) is not None]
    if not given:
        return []
    (key, held), *others = given
    if type(held) is dict:
        key, held = next(((name, value) for name in INNER_KEYS if (value := held.get(name))), (key, None))
    if others or type(held) is not str or not held:
        raise BadChat("bad_shape", f"{where}: not one picture, as a path, an address or base64 ({', '.join(keys)})")
    try:
        return [name_of(held) if key in AS_BASE64 else path_of(held)]
    except ValueError as error:
        raise BadChat("bad_picture", f"{where}: {error}") from None


def is_path(name: str) -> bool:
    """Return whether a picture's name surely is a path as it is: no base64, no data URL, and no file URL."""
    return 0 < len(name) <= SHORTEST and name[4:5] != ":"


def calls_in(held: Any, where: str) -> list[Any]:
    """Return calls as a list. held: one or a list, maybe as JSON."""
    if type(held) is str:
        held = decoded(held, "bad_call", f"{where}: the call")
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
    return tools_text([_declaration(number, tool) for number, tool in enumerate(listed)])


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


def decoded(text: str, reason: str, label: str) -> Any:
    """Return decoded JSON. reason: that of the reject if it is none, or has a key twice. label: for people."""
    try:
        value = msgspec.json.decode(text.encode())
    except (ValueError, RecursionError) as error:
        raise BadChat(reason, f"{label}: {error}") from None
    if fault := key_fault(text.encode()):
        raise BadChat(reason, f"{label}: {fault}")
    return value


def kind_of(value: Any) -> str:
    """Return what a JSON value is, for people."""
    if value is None or value is UNSET:
        return "null"
    names = {bool: "a boolean", str: "a text", list: "a list", dict: "an object"}
    return names.get(type(value), "a number")
