"""The form of a conversation: its speakers and their order, and the places of picture tags.

Every row becomes a list of turns. The first may be from system; then human and gpt take turns. Before gpt answers, it
may call functions (function_call, one call each) and read what they return (observation). Training uses the turns of
gpt and function_call as targets, but those whose `loss` is false. A tag stands for a picture; turns of human and
observation may have some, each anywhere.
"""

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType

from vlmflow.rows.rejects import Reject

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


def said(turns: Sequence[Turn]) -> list[str]:
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
