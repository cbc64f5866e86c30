"""What a conversation is: who speaks and in which order, what is asked and answered, and where pictures are.

Every row becomes a list of turns: it may begin with one from system, then human and gpt alternate, and the last turn is
gpt's. The training uses gpt's turns as targets. If the row has a picture, the first human turn begins with FIRST_LINE.
"""

from collections.abc import Sequence
from itertools import cycle
from typing import Annotated, Literal

import msgspec

from vlmflow.rows.rejects import Reject

IMAGE_TAG = "<image>"
FIRST_LINE = IMAGE_TAG + "\n"

ROLES = {"system": "system", "human": "user", "gpt": "assistant"}
"""What a chat template calls those who speak."""

SPEAKERS = ["human", "gpt"]
"""Who speaks in turns, after the system turn."""

Speaker = Literal["system", "human", "gpt"]

Text = Annotated[str, msgspec.Meta(min_length=1)]


class Turn(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """One turn. from: who speaks. value: the text."""

    speaker: Speaker = msgspec.field(name="from")
    value: Text


def from_system(prompt: str | None) -> list[Turn]:
    """Give the turns of a system prompt: one, or none without a prompt."""
    return [] if prompt is None else [Turn("system", prompt)]


def dialogue_start(turns: Sequence[Turn]) -> int:
    """Give the number of the turn that opens the dialogue: 1 after a turn from system, else 0."""
    return 1 if turns[0].speaker == "system" else 0


def said(turns: Sequence[Turn]) -> list[str]:
    """Give the texts of human and gpt, in order."""
    return [turn.value for turn in turns if turn.speaker != "system"]


def answers(turns: Sequence[Turn]) -> list[str]:
    """Give the texts that are trained."""
    return [turn.value for turn in turns if turn.speaker == "gpt"]


def without_tags(question: str) -> str:
    """Give a question without picture tags, wherever they are."""
    return question.replace(IMAGE_TAG, "")


def wrong_order(turns: Sequence[Turn], first: int) -> Reject:
    """Say who speaks out of turn from turn number `first` on, or who gets no answer."""
    for number, (turn, expected) in enumerate(zip(turns[first:], cycle(SPEAKERS), strict=False), start=first):
        if turn.speaker != expected:
            return Reject("alternation", f"turn {number} is from {turn.speaker}, expected {expected}")
    return Reject("alternation", f"turn {len(turns) - 1} is from {turns[-1].speaker} and has no answer")
