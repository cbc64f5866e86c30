"""A training row in ShareGPT form: its type, its published schema, and the rules no schema can express."""

import re
from collections.abc import Sequence
from typing import Annotated, Any, Self, TypeVar

import msgspec
from msgspec import UNSET, Meta

from vlmflow.config.row_settings import RowLimits
from vlmflow.rows.chat import (
    FIRST_LINE,
    IMAGE_TAG,
    SPEAKERS,
    Text,
    Turn,
    answers,
    dialogue_start,
    tags_in,
    wrong_order,
)
from vlmflow.rows.rejects import Reject

Item = TypeVar("Item")

SPECIAL_TOKEN = re.compile(r"<\|[^<>|\s]{1,40}\|>|</?(?:tool_call|tool_response|think)>")
"""Texts that Qwen's tokenizers always read as one token: chat marks, picture pads, tool and think tags
(added_tokens in the tokenizer_config.json of Qwen3 and Qwen3-VL)."""

STRAY_TAG = re.compile(r"<(?:image|video|audio|bbox|ref-object|cot-process|start-image)>")
"""Tags that ms-swift's template replaces in a row with a picture (4.6, template/base.py)."""

PICTURE_TAG = re.compile(IMAGE_TAG)
"""What a row without a picture must not have either. There the template replaces no tag, so a text may speak of HTML's;
but our own stages would take this one for a picture."""

PLACEHOLDER = re.compile(r"\{\{(?:SYSTEM|QUERY|ROUND0|ROUND1)\}\}")
"""What ms-swift replaces in questions and system prompts, by the template (Template._concat_context_list); not in
answers."""

PATH_TAG = re.compile(r"^(?>.*?(<img>)).+</img>", re.MULTILINE)
"""What ms-swift takes for a picture's path in the texts of a row without pictures, for a model that sees pictures
(Template._replace_image_tags)."""

CONTROL_CHARACTER = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
"""The control characters of ASCII but tab and line feed: no turn may contain them."""

MARKS = {"stray_tag": STRAY_TAG, "special_token": SPECIAL_TOKEN, "control_character": CONTROL_CHARACTER}
"""Patterns that no text of a row with a picture may contain, by the reason of the reject."""

MARKS_WITHOUT_PICTURE = MARKS | {"stray_tag": PICTURE_TAG}

OTHER_ESCAPE = re.compile(rb'\\[^n"]')
"""A JSON escape other than those of line feed and quotation mark; an escaped backslash is one too."""

TWO_BRACES = re.compile(rb"\{(?<=\{\{)").search
"""Finds `{{`, in half of the time of a plain search for two bytes: there are few braces."""

ENCODER = msgspec.json.Encoder()

CONVERSATIONS = b',"conversations":['
"""The beginning of an encoded row's last field. No text contains it, because JSON escapes quotation marks."""

Counted = Annotated[float, Meta(multiple_of=1, ge=1, le=10_000)]
Score = Annotated[float, Meta(multiple_of=1, ge=0, le=10)]
"""Whole numbers, as JSON Schema defines them: 3 and 3.0 are equal."""


class ShareGptRow(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """One training row: a conversation. Every stage behind the conversion reads rows as this type.

    id: split, raw row number and checksum; in the timestep form the attempt too.
    source: the question's source in the raw row.
    images: names relative to the data set's picture store; one, or none in a data set without pictures.
    attempts: the number of each answer (gpt turn) in the raw row, counted from 1.
    scores: a teacher's score of each answer, 0 to 10; empty if the raw row has none.
    conversations: turns from human and gpt in strict alternation, after an optional one from system. The first
    human turn begins with "<image>\\n" if the row has a picture; the tag is nowhere else. If answers have `loss`, all
    of them do; those with false are history and not trained, and the last one is trained.
    """

    id: Text
    source: Text
    images: Annotated[list[Text], Meta(max_length=1)]
    attempts: Annotated[list[Counted], Meta(min_length=1)]
    scores: list[Score]
    conversations: Annotated[list[Turn], Meta(min_length=2)]

    def until(self, end: int) -> Self:
        """Return the row with its turns before index `end` alone; see `without`."""
        return self.without(end, len(self.conversations))

    def without(self, first: int, end: int) -> Self:
        """Return the row without its turns from index `first` to `end`, which is excluded.

        Their pictures go with them, and attempts and scores of their answers.
        """
        before, between = self.conversations[:first], self.conversations[first:end]
        return msgspec.structs.replace(
            self,
            images=_without(self.images, tags_in(before), tags_in(between)),
            attempts=_without(self.attempts, len(answers(before)), len(answers(between))),
            scores=_without(self.scores, len(answers(before)), len(answers(between))),
            conversations=_without(self.conversations, first, len(between)),
        )


def _without(items: list[Item], first: int, count: int) -> list[Item]:
    return items[:first] + items[first + count :]


def as_line(row: ShareGptRow, images: list[str]) -> bytes:
    """Return a row as a line of a training file, without the line feed.

    images: its names of pictures. Numbers become integers: a decoded row has floats.
    """
    return ENCODER.encode(
        ShareGptRow(
            id=row.id,
            source=row.source,
            images=images,
            attempts=list(map(int, row.attempts)),
            scores=list(map(int, row.scores)),
            conversations=row.conversations,
        )
    )


def conversation_in(line: bytes) -> bytes:
    """Return the part of a training row's line from its conversation on, which is equal for equal conversations."""
    return line[line.index(CONVERSATIONS) :]


def json_schema() -> dict[str, Any]:
    """Return the published JSON Schema (draft 2020-12) of a row, made from the types that check it."""
    schema = msgspec.json.schema(ShareGptRow)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "vlmflow training row",
        **schema,
    }


def may_hold_marks(line: bytes, tags: int = 1) -> bool:
    """Return whether a row's texts may contain a tag, a special token or a control character.

    This looks at bytes of the line, ten times faster than a search in every turn, and nearly all rows have nothing. A
    tag or token needs one more `<` than the `tags` expected picture tags, a placeholder needs `{{`, or they need an
    escape: JSON may escape these. A control character needs an escape other than those of line feed and quotation mark;
    only DEL is written as itself.

    line: the row as JSON. tags: the number of its pictures.
    """
    return (
        line.count(b"<") > tags
        or TWO_BRACES(line) is not None
        or b"\x7f" in line
        or OTHER_ESCAPE.search(line) is not None
    )


def first_fault(row: ShareGptRow, limits: RowLimits, marks: bool = True) -> Reject | None:
    """Return the first fault of a row that fits the schema, or None if it has none.

    marks: whether to search for tags, special tokens and control characters; `may_hold_marks` shows when it is needed.
    """
    turns = row.conversations
    if len(turns) > limits.max_turns:
        return Reject("too_many_turns", f"{len(turns)} turns, at most {limits.max_turns} are allowed")
    first = dialogue_start(turns)
    rounds = (len(turns) - first) // 2
    if [turn.speaker for turn in turns[first:]] != SPEAKERS * rounds or not rounds:
        return wrong_order(turns, first)
    if len(row.attempts) != rounds or len(row.scores) not in (0, rounds):
        return Reject("schema", f"{rounds} answers, {len(row.attempts)} attempts, {len(row.scores)} scores")
    if fault := _wrong_loss(turns):
        return Reject("schema", fault)
    texts = [turn.value for turn in turns]
    if row.images:
        if not texts[first].startswith(FIRST_LINE):
            return Reject("image_tag", f"turn {first} begins with {texts[first][:20]!r}, not with {IMAGE_TAG}")
        texts[first] = texts[first].removeprefix(FIRST_LINE)
    for number, text in enumerate(texts):
        if len(text) > limits.max_turn_chars:
            return Reject("turn_too_long", f"turn {number} has {len(text)} characters, at most {limits.max_turn_chars}")
        if not text or text.isspace():
            return Reject("empty_turn", f"turn {number} holds no text")
        if marks and (mark := _mark(text, with_picture=bool(row.images), answer=turns[number].speaker == "gpt")):
            reason, found = mark
            group = found.lastindex or 0
            return Reject(reason, f"turn {number} holds {found[group]!r} at character {found.start(group)}")
    return None


def _wrong_loss(turns: Sequence[Turn]) -> str | None:
    """Return what is wrong with the key `loss` of turns, or None.

    The end of a last answer would be trained, although its text is not (ms-swift 4.6, template/base.py).
    """
    if all(turn.loss is UNSET for turn in turns):
        return None
    if [turn.loss is not UNSET for turn in turns] != [turn.speaker == "gpt" for turn in turns]:
        return "loss: all answers have it, or none, and no other turn"
    return None if turns[-1].loss else "loss: the last answer is not trained, so the row must end before it"


def _mark(text: str, *, with_picture: bool, answer: bool) -> tuple[str, re.Match[str]] | None:
    """Return the reason to reject a text, and what it holds. with_picture: of its row. answer: whether it is one."""
    patterns = [*(MARKS if with_picture else MARKS_WITHOUT_PICTURE).items()]
    if not answer:
        patterns.append(("stray_tag", PLACEHOLDER))
    if not with_picture:
        patterns.append(("stray_tag", PATH_TAG))
    for reason, pattern in patterns:
        if found := pattern.search(text):
            return reason, found
    return None
