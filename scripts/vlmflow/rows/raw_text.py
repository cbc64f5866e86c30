"""Makes ids and turns from raw rows, and changes their texts by the rules of docs/data.md."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple
from zlib import crc32

import msgspec
from msgspec import UnsetType

from vlmflow.config.key_meanings import is_given
from vlmflow.rows.chat import FIRST_LINE, IMAGE_TAG, Turn, from_system


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
    asked: Iterable[tuple[str, str]],
    system: str | UnsetType | None = None,
    history: Sequence[tuple[str, str]] | UnsetType | None = None,
    source: str | UnsetType | None = None,
) -> Reading:
    """Return the turns of a row whose questions stand beside their answers.

    asked: each question with its answer. system: the system prompt, if it holds anything (`key_meanings.is_given`).
    history: the rounds before, like `asked`; blank ones count as none. source: see `Reading`.
    """
    turns = from_system(system) if system and is_given(system) else []
    before = [pair for pair in history or () if any(map(str.strip, pair))]
    for question, answer in [*before, *asked]:
        turns += Turn("human", question), Turn("gpt", answer)
    return Reading(turns, source=source or None)
