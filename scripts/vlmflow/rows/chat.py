"""The reasons why a row is not used.

The form of a conversation: its speakers and their order, and the places of picture tags.

Every row becomes a list of turns. The first may be from system; then human and gpt take turns. Before gpt answers, it
may call functions (function_call, one call each) and read what they return (observation). Training uses the turns of
gpt and function_call as targets, but those whose `loss` is false. A tag stands for a picture; turns of human and
observation may have some, each anywhere.

The functions that a conversation's assistant may call: their declarations, calls and responses.

Rows have declarations and calls as JSON in one form, that of `tools_text` and `call_text`: the text that a model reads.
ms-swift and chat templates decode and encode them again, so any other text would be trained as one that no check has
seen, a token of the chat in escapes among them.

Turns as the messages that servers, chat templates and ms-swift take.

The mark before an answer: students in FIRE write `Thought: …` and then `Answer: …`.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType

from vlmflow.core.errors import VlmflowError, counted


class Reject(msgspec.Struct, frozen=True):
    """A row that is not used.

    reason: a key of REASONS, or `picture_` and a key of `pictures.manifest.REASONS`.
    detail: the exact cause, with the value, for people.
    """

    reason: str
    detail: str


REASONS = {
    "source_left_out": "the row's source is not among the requested ones (sources)",
    "not_sampled": "fewer rows are requested, and this one was not drawn (max_samples, or #N after the address)",
    "not_drawn": "the mixture takes only a part of the data set's rows, and this one was not drawn (mix)",
    "text_only": "the row has no picture, and rows with pictures are requested (modality)",
    "has_picture": "the row has a picture, and rows without pictures are requested (modality)",
    "not_taken": "the row's label does not call its answer a good one (take: true)",
    "no_good_attempt": "no attempt of the trajectory has the score from which attempts are trained (min_score)",
    "bad_table_row": "the row cannot be read: in a table, fields, quotation or UTF-8 are wrong; or it is too long",
    "bad_json": "the row is not valid JSON",
    "duplicate_key": "a key is given twice in one object, or keys of pictures differ only in letter case",
    "bad_shape": "a key is missing, or a value does not have the type that the raw form requires",
    "wrong_role": "a speaker that the form does not know, or that does not speak there",
    "unbalanced_turns": "a trajectory's answer has no feedback, or a conversation has no turns at all",
    "empty_turn": "a question, an answer or a feedback holds no text",
    "unreadable_score": "a feedback has no score, or not a whole number from 0 to 10",
    "schema": "the row does not fit the published schema",
    "alternation": "the speakers do not take turns in the required order, or the last turn is no answer",
    "nothing_trained": "no answer is trained",
    "bad_tools": "the tools are no list of declarations, each of a function with a name",
    "bad_call": "a call is not JSON, names no declared tool, or does not fit the responses behind it",
    "image_tag": "the row has more or fewer <image> tags than pictures",
    "stray_tag": "the text contains a tag or placeholder that the trainer replaces (<image>, {{ROUND0}}, ...)",
    "special_token": "the text contains a token that begins or ends turns, calls, responses or thoughts",
    "control_character": "the text contains a control character other than line feed and tab",
    "too_many_turns": "the conversation has more turns than the limit",
    "turn_too_long": "a turn, or the declarations of the tools, have more characters than the limit",
    "too_many_pictures": "the row has more pictures than the limit",
    "bad_picture": "a picture in the row itself is not base64, or one of several is empty",
    "picture_unresolved": "the picture's path is not in the image manifest",
    "duplicate": "an earlier row has the same conversation and the same pictures, or none",
    "in_test_split": "a picture, or the prompt of a row without one, is also in a test split",
    "in_val_split": "a picture, or the prompt of a row without one, is also in a validation split",
    "near_test_picture": "a picture looks like one in the test split (near_duplicates.drop)",
    "near_test_question": "a row without a picture asks nearly the same as a test row (near_duplicates.drop)",
}
"""All reasons but those of unusable pictures: these are in `pictures.manifest`, and get the prefix `picture_`."""

LEFT_OUT = frozenset(
    {"source_left_out", "not_sampled", "not_drawn", "text_only", "has_picture", "not_taken", "no_good_attempt"}
)
"""Reasons of rows that the configuration does not request: they are counted, but not in the quarantine."""

HARMLESS = LEFT_OUT | frozenset(
    {"duplicate", "in_test_split", "in_val_split", "near_test_picture", "near_test_question"}
)
"""Reasons that are no fault of the data: these rows do not count toward the limit of rejects."""


IMAGE_TAG = "<image>"
FIRST_LINE = IMAGE_TAG + "\n"

THOUGHT = "<think>"
"""The beginning of an answer's reasoning."""

LINE_FEED = "\n"

ROLES = {
    "system": "system",
    "human": "user",
    "gpt": "assistant",
    "function_call": "assistant",
    "observation": "tool",
}
"""The names of the speakers in chat templates."""

SPEAKERS = ["human", "gpt"]
"""The speakers of a dialogue without functions, in their order."""

ASSISTANT = ("gpt", "function_call")
"""The speakers whose turns are trained."""

SHOWS_PICTURES = ("human", "observation")
"""The speakers whose turns may have picture tags."""

FOLLOWS = {
    "": ("system", "human"),
    "system": ("human",),
    "human": ("gpt", "function_call"),
    "gpt": ("human", "function_call"),
    "function_call": ("function_call", "observation", "human"),
    "observation": ("observation", "gpt", "function_call"),
}
"""Who may speak after whom; "" is the beginning. The last turn is from one of ASSISTANT."""

Speaker = Literal["system", "human", "gpt", "function_call", "observation"]

Text = Annotated[str, msgspec.Meta(min_length=1)]


class PlainTurn(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """One turn of a raw row in this form. from: who speaks. value: the text."""

    loss: ClassVar[bool | UnsetType] = UNSET
    speaker: Speaker = msgspec.field(name="from")
    value: Text


class Turn(PlainTurn, forbid_unknown_fields=True, gc=False):
    """One turn of a training row. from: who speaks. value: the text.

    loss: whether an answer is trained, for ms-swift (4.6, loss_scale/base.py). Without it the data set's form decides.
    All answers of a row have it, or none: ms-swift's reader fixes the keys of turns by the first 10 MB of a file, and
    dies at a key that comes later.
    """

    loss: bool | UnsetType = UNSET  # type: ignore[misc]  # a field, where raw turns have none


def from_system(prompt: str | None) -> list[Turn]:
    """Return the turns that stand before a dialogue: one with the system prompt, none without it."""
    return [] if prompt is None else [Turn("system", prompt)]


def dialogue_start(turns: Sequence[Turn]) -> int:
    """Return the index of the first turn of the dialogue: 1 after a turn from system, else 0."""
    return 1 if turns[0].speaker == "system" else 0


def turn_texts(turns: Sequence[Turn]) -> list[str]:
    """Return the texts of all turns but that of system, in order."""
    return [turn.value for turn in turns if turn.speaker != "system"]


def answers(turns: Sequence[Turn]) -> list[str]:
    """Return gpt's texts, in order."""
    return [turn.value for turn in turns if turn.speaker == "gpt"]


def places_answered(turns: Sequence[Turn]) -> list[tuple[int, int]]:
    """Return where the assistant speaks: of each time the index of its first turn, and that behind its last.

    A text and the calls right behind it are said at one time.
    """
    places: list[tuple[int, int]] = []
    for number, turn in enumerate(turns):
        if turn.speaker not in ASSISTANT:
            continue
        first = places.pop()[0] if places and places[-1][1] == number else number
        places.append((first, number + 1))
    return places


def times_answered(turns: Sequence[Turn]) -> int:
    """Return how often the assistant speaks."""
    return len(places_answered(turns))


def tags_in(turns: Sequence[Turn]) -> int:
    """Return how many pictures are shown in some turns."""
    return sum(turn.value.count(IMAGE_TAG) for turn in turns)


def with_thought(thought: str, answer: str) -> str:
    """Return an answer with the reasoning before it, as the chat templates of Qwen's thinking models write it.

    answer: "" if there is only reasoning, as before a call.
    """
    written = f"{THOUGHT}\n{thought.strip(LINE_FEED)}\n</think>"
    return f"{written}\n\n{answer.lstrip(LINE_FEED)}" if answer else written


def thought_first(answer: str) -> str:
    """Return an answer that begins with a thought, with this thought in the form of `with_thought`."""
    thought, end, rest = answer.removeprefix(THOUGHT).partition("</think>")
    return with_thought(thought, rest.lstrip(LINE_FEED)) if end and answer.startswith(THOUGHT) else answer


def without_tags(question: str) -> str:
    """Remove all picture tags from a question."""
    return question.replace(IMAGE_TAG, "")


def wrong_order(turns: Sequence[Turn]) -> Reject | None:
    """Return the rejection of turns that are not in the order of FOLLOWS, or lack a last answer; None if all is right.

    It names the first turn of the wrong speaker.
    """
    before = ""
    for number, turn in enumerate(turns):
        if turn.speaker not in FOLLOWS[before]:
            expected = " or ".join(FOLLOWS[before])
            return Reject("alternation", f"turn {number} is from {turn.speaker}, expected {expected}")
        before = turn.speaker
    if before not in ASSISTANT:
        return Reject("alternation", f"turn {len(turns) - 1} is from {before} and has no answer")
    return None


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
            declared = {tool.function.name for tool in DECLARATIONS.decode(tools.encode())}
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
    at = next((index for index, (own, other) in pairs if own != other), min(len(read), len(written)))
    return f"{read[at : at + 20]!r}, not {written[at : at + 20]!r}, at character {at}"


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
        wanted, given = counted(tags, "picture tag"), counted(len(pictures), "picture")
        raise VlmflowError(f"{wanted} ({IMAGE_TAG}) but {given}", "give one picture for each tag")
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


MARK = re.compile(r"answer\s{0,3}[:：]", re.IGNORECASE)

EMPHASIS = "*_`"
"""Marks of Markdown that may be around the mark, or around it and the answer."""


def after_mark(text: str) -> str | None:
    """Return the text after the last `Answer:`, which may be empty; None if the text has no mark.

    The word may stand in the thought, too. Emphasis that begins before the mark is removed with it: `**Answer:** 3` and
    `**Answer: 3**` give `3`.
    """
    marks = list(MARK.finditer(text))
    if not marks:
        return None
    before, after = text[: marks[-1].start()], text[marks[-1].end() :].strip()
    if opened := before[len(before.rstrip(EMPHASIS)) :]:
        after = after.removeprefix(opened) if after.startswith(opened) else after.removesuffix(opened)
    return after.strip()
