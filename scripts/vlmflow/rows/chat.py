"""The form of a conversation: its speakers and their order, and the place of the picture tag.

Every row becomes a list of turns. The first may be from system; then human and gpt alternate, and gpt has the last
turn. Training uses gpt's turns as targets, but those whose `loss` is false. If the row has a picture, the first human
turn begins with FIRST_LINE.
"""

from collections.abc import Sequence
from itertools import cycle
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType

from vlmflow.rows.rejects import Reject

IMAGE_TAG = "<image>"
FIRST_LINE = IMAGE_TAG + "\n"

ROLES = {"system": "system", "human": "user", "gpt": "assistant"}
"""The names of the speakers in chat templates."""

SPEAKERS = ["human", "gpt"]
"""The speakers of the dialogue, in their order; system is not part of it."""

Speaker = Literal["system", "human", "gpt"]

Text = Annotated[str, msgspec.Meta(min_length=1)]


class PlainTurn(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """One turn of a raw row in this form. from: who speaks. value: the text.

    A key `loss` in a raw row is not read, so it stops the conversion like all keys that change what a row means.
    """

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
    """Return a system prompt as a list of one turn; [] if there is no prompt."""
    return [] if prompt is None else [Turn("system", prompt)]


def dialogue_start(turns: Sequence[Turn]) -> int:
    """Return the index of the first turn of the dialogue: 1 after a turn from system, else 0."""
    return 1 if turns[0].speaker == "system" else 0


def said(turns: Sequence[Turn]) -> list[str]:
    """Return the texts of human and gpt, in order."""
    return [turn.value for turn in turns if turn.speaker != "system"]


def answers(turns: Sequence[Turn]) -> list[str]:
    """Return gpt's texts, in order."""
    return [turn.value for turn in turns if turn.speaker == "gpt"]


def tags_in(turns: Sequence[Turn]) -> int:
    """Return how many pictures are shown in some turns."""
    return sum(turn.value.count(IMAGE_TAG) for turn in turns)


def without_tags(question: str) -> str:
    """Remove all picture tags from a question."""
    return question.replace(IMAGE_TAG, "")


def wrong_order(turns: Sequence[Turn], first: int) -> Reject:
    """Return the rejection of a dialogue that begins at index `first`, and in which human and gpt do not alternate.

    It names the first turn of the wrong speaker, or a last turn without an answer.
    """
    for number, (turn, expected) in enumerate(zip(turns[first:], cycle(SPEAKERS), strict=False), start=first):
        if turn.speaker != expected:
            return Reject("alternation", f"turn {number} is from {turn.speaker}, expected {expected}")
    return Reject("alternation", f"turn {len(turns) - 1} is from {turns[-1].speaker} and has no answer")
