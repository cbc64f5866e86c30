"""A training row in ShareGPT form: its type, its published schema, and the rules no schema can express.

How much of the text that is trained comes from bad attempts.

Reads a data set's files line by line, so that memory does not grow with the rows.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

import msgspec
from msgspec import UNSET, Meta

from vlmflow.config.settings import GOOD, RowLimits
from vlmflow.core.account import read_lines
from vlmflow.core.errors import counted
from vlmflow.core.files import count_lines
from vlmflow.core.progress import Progress
from vlmflow.rows.chat import (
    ASSISTANT,
    FIRST_LINE,
    IMAGE_TAG,
    SHOWS_PICTURES,
    SPEAKERS,
    THOUGHT,
    Reject,
    Text,
    Turn,
    dialogue_start,
    tags_in,
    thought_first,
    times_answered,
    tool_fault,
    wrong_order,
)

Item = TypeVar("Item")

SPECIAL_TOKEN = re.compile(r"<\|[^<>|\s]{1,40}\|>|</?(?:tool_call|tool_response|think)>")
"""Texts that Qwen's tokenizers always read as one token: chat marks, picture pads, tool and think tags
(added_tokens in the tokenizer_config.json of Qwen3 and Qwen3-VL). Only think tags are allowed, around the reasoning at
the beginning of an answer (`chat.with_thought`)."""

STRAY_TAG = re.compile(r"<(?:image|video|audio|bbox|ref-object|cot-process|start-image)>")
"""Tags that ms-swift's template replaces in a row with a picture (4.6, template/base.py)."""

BLANKS = " " * len(IMAGE_TAG)
"""What takes a picture's tag's place in the search for marks, so that places stay the same."""

PLACEHOLDER = re.compile(r"\{\{(?:SYSTEM|QUERY|ROUND0|ROUND1)\}\}")
"""What ms-swift replaces in questions and system prompts, by the template (Template._concat_context_list); not in
answers."""

PATH_TAG = re.compile(r"^(?>.*?(<img>)).+</img>", re.MULTILINE)
"""What ms-swift takes for a picture's path in the texts of a row without pictures, for a model that sees pictures
(Template._replace_image_tags)."""

CONTROL_CHARACTER = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
"""The control characters of ASCII but tab and line feed: no turn may contain them."""

MARKS = {"stray_tag": STRAY_TAG, "special_token": SPECIAL_TOKEN, "control_character": CONTROL_CHARACTER}
"""Patterns that no text of a row with pictures may contain but its picture tags, by the reason of the reject."""

MARKS_WITHOUT_PICTURE = {reason: pattern for reason, pattern in MARKS.items() if pattern is not STRAY_TAG}
"""In a row without a picture the template replaces no tag, so a text may speak of HTML's."""

OTHER_ESCAPE = re.compile(rb'\\[^n"]')
"""A JSON escape other than those of line feed and quotation mark; an escaped backslash is one too."""

TWO_BRACES = re.compile(rb"\{(?<=\{\{)").search
"""Finds `{{`, in half of the time of a plain search for two bytes: there are few braces."""

ENCODER = msgspec.json.Encoder()

CONVERSATIONS = b',"conversations":['
"""The beginning of what follows an encoded row's facts: turns and tools. No text contains it, because JSON escapes
quotation marks."""

TOOLS = b'],"tools":"'
"""The beginning of an encoded row's tools, behind its turns; likewise."""

Counted = Annotated[float, Meta(multiple_of=1, ge=1, le=10_000)]
Score = Annotated[float, Meta(multiple_of=1, ge=0, le=10)]
"""Whole numbers, as JSON Schema defines them: 3 and 3.0 are equal."""


class ShareGptRow(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """One training row: a conversation. Every stage behind the conversion reads rows as this type.

    id: split, raw row number and checksum; in the timestep form the attempt too.
    source: the question's source in the raw row.
    images: names relative to the data set's picture store, in the order of their tags.
    attempts: the number of each answer (see `chat.times_answered`) in the raw row, counted from 1.
    scores: a teacher's score of each answer, 0 to 10; empty if the raw row has none.
    conversations: turns in the order of `chat.FOLLOWS`. Those of human and observation have a tag "<image>" for each
    picture, and no other text has one. If turns have `loss`, all of gpt and function_call do; those with false are
    history and not trained, and the last one is trained. A turn of function_call is JSON, {"name": …, "arguments": …},
    as `tools.call_text` writes it.
    tools: the declarations of the functions, a JSON list as a text, as `tools.tools_text` writes it; absent if there
    are none.
    """

    id: Text
    source: Text
    images: list[Text]
    attempts: Annotated[list[Counted], Meta(min_length=1)]
    scores: list[Score]
    conversations: Annotated[list[Turn], Meta(min_length=2)]
    tools: str = ""

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
            attempts=_without(self.attempts, times_answered(before), times_answered(between)),
            scores=_without(self.scores, times_answered(before), times_answered(between)),
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
            tools=row.tools,
        )
    )


def conversation_in(line: bytes) -> bytes:
    """Return the part of a training row's line from its conversation on, which is equal for equal conversations."""
    return line[line.index(CONVERSATIONS) :]


def has_tools(line: bytes) -> bool:
    """Return whether a training row's line has tools."""
    return TOOLS in line


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
    if len(row.images) > limits.max_pictures:
        return Reject("too_many_pictures", f"{len(row.images)} pictures, at most {limits.max_pictures} are allowed")
    first = dialogue_start(turns)
    answers = (len(turns) - first) // 2
    if row.tools or [turn.speaker for turn in turns[first:]] != SPEAKERS * answers or not answers:
        if fault := wrong_order(turns) or tool_fault(row.tools, turns):
            return fault
        answers = times_answered(turns)
    if len(row.attempts) != answers or len(row.scores) not in (0, answers):
        return Reject("schema", f"{answers} answers, {len(row.attempts)} attempts, {len(row.scores)} scores")
    if fault := _wrong_loss(turns):
        return fault
    with_picture = bool(row.images)
    # If there is nothing to search for, the row has no more `<` than pictures.
    as_nearly_all = not row.images or (len(row.images) == 1 and turns[first].value.startswith(FIRST_LINE))
    if (marks or not as_nearly_all) and (fault := _wrong_tags(row)):
        return fault
    for number, turn in enumerate(turns):
        text = turn.value
        if len(text) > limits.max_turn_chars and (written := len(_without_tag_lines(text))) > limits.max_turn_chars:
            return Reject("turn_too_long", f"turn {number} has {written} characters, at most {limits.max_turn_chars}")
        if not text or text.isspace():
            return Reject("empty_turn", f"turn {number} holds no text")
        if marks and (fault := _mark(turn, f"turn {number}", with_picture)):
            return fault
    if len(row.tools) > limits.max_turn_chars:
        return Reject("turn_too_long", f"tools have {len(row.tools)} characters, at most {limits.max_turn_chars}")
    return _mark(Turn("system", row.tools), "tools", with_picture) if marks else None


def _wrong_tags(row: ShareGptRow) -> Reject | None:
    """Return the rejection of a row with more or fewer picture tags than pictures, or with one in the wrong turn."""
    for number, turn in enumerate(row.conversations):
        if turn.speaker not in SHOWS_PICTURES and IMAGE_TAG in turn.value:
            counts = f"{counted(tags_in(row.conversations), 'picture tag')}, {counted(len(row.images), 'picture')}"
            return Reject(
                "stray_tag", f"turn {number} is from {turn.speaker} and shows a picture ({IMAGE_TAG}): {counts}"
            )
    return wrong_number_of_tags(tags_in(row.conversations), len(row.images))


def wrong_number_of_tags(tags: int, pictures: int) -> Reject | None:
    """Return the rejection of a row with more or fewer picture tags than pictures; None if they are equal."""
    if tags == pictures:
        return None
    return Reject("image_tag", f"{counted(tags, 'picture tag')} ({IMAGE_TAG}) but {counted(pictures, 'picture')}")


def _without_tag_lines(text: str) -> str:
    return text.replace(FIRST_LINE, "").replace(IMAGE_TAG, "")


def _wrong_loss(turns: Sequence[Turn]) -> Reject | None:
    """Return what is wrong with the key `loss` of turns, or None.

    The end of a last answer would be trained, although its text is not (ms-swift 4.6, template/base.py). Calls in a row
    are one message there, with the `loss` of the first.
    """
    losses = [turn.loss for turn in turns]
    if losses.count(UNSET) == len(losses):
        return None
    if [loss is not UNSET for loss in losses] != [turn.speaker in ASSISTANT for turn in turns]:
        return Reject("schema", "loss: all answers have it, or none, and no other turn")
    if True not in losses:
        return Reject("nothing_trained", "loss is false in every answer")
    if not losses[-1]:
        return Reject("schema", "loss: the last answer is not trained, so the row must end before it")
    if any(turn.speaker == other.speaker and turn.loss != other.loss for turn, other in pairwise(turns)):
        return Reject("schema", "loss: calls in a row are trained, or not, together")
    return None


def _mark(turn: Turn, label: str, with_picture: bool) -> Reject | None:
    """Return the rejection of a text that contains one of MARKS. label: names it. with_picture: whether its row has."""
    text = turn.value
    patterns = [*(MARKS if with_picture else MARKS_WITHOUT_PICTURE).items()]
    if turn.speaker not in ASSISTANT:
        patterns.append(("stray_tag", PLACEHOLDER))
    if not with_picture:
        patterns.append(("stray_tag", PATH_TAG))
    elif turn.speaker in SHOWS_PICTURES:
        text = text.replace(IMAGE_TAG, BLANKS)
    if turn.speaker == "gpt" and text.startswith(THOUGHT) and "</think>" in text and thought_first(text) == text:
        text = text.replace(THOUGHT, " " * len(THOUGHT), 1).replace("</think>", " " * len("</think>"), 1)
    for reason, pattern in patterns:
        if match := pattern.search(text):
            group = match.lastindex or 0
            return Reject(reason, f"{label} holds {match[group]!r} at character {match.start(group)}")
    return None


def last_answer_only(form: str, train_on: str) -> bool:
    """Return whether only the last answer of a row is trained. form, train_on: see `data_settings.DatasetSettings`."""
    return form == "timestep" or train_on == "last"


def loss_scale(last_answer_only: bool) -> str:
    """Return the value of ms-swift's `loss_scale` that selects the trained answers: the last one of a row, or all."""
    return "last_round" if last_answer_only else "default"


def trained_characters(turns: Sequence[Turn], scores: Sequence[float], last_answer_only: bool) -> dict[int, int]:
    """Return the characters of a row's trained answers by score; {} if its answers have no scores.

    turns, scores: those of the row. last_answer_only: whether all other answers are history.
    """
    characters: dict[int, int] = {}
    if scores:
        answers = zip([turn for turn in turns if turn.speaker == "gpt"], map(int, scores), strict=True)
        for turn, score in list(answers)[-1:] if last_answer_only else answers:
            if turn.loss is not False:
                characters[score] = characters.get(score, 0) + len(turn.value)
    return characters


def is_mixed(trained: Mapping[int, int]) -> bool:
    """Return whether any of the text is from a bad attempt. trained: its characters by score."""
    return any(score < GOOD for score in trained)


def in_words(trained: Mapping[int, int], datasets: Sequence[str], good_run: str | None) -> str | None:
    """Return what the scores of the trained text mean, for people; None without scores.

    trained: its characters by score. datasets: the names of those that it is from. good_run: a run that trains the
    good attempts of the same data alone, if there is one.
    """
    bad = sum(characters for score, characters in trained.items() if score < GOOD)
    if not trained:
        return None
    if not is_mixed(trained):
        return f"all of the trained text is attempts scored at least {min(trained)}"
    keys = [f"datasets.{name}.min_score: {GOOD}" for name in datasets]
    instead = f"run {good_run} trains" if good_run else f"{' with '.join(keys)} trains"
    return (
        f"{bad / sum(trained.values()):.0%} of the trained text is attempts scored below {GOOD}; {instead} the others"
    )


Line = TypeVar("Line")


def lines_of(file: Path, form: type[Line]) -> Iterator[Line]:
    """Yield every line of a file, decoded as `form`, and show the progress.

    Raises VlmflowError if a line does not have this form.
    """
    with Progress(f"reading {file}", count_lines(file), "rows") as progress:
        for line in read_lines(file, form):
            yield line
            progress.advance()
