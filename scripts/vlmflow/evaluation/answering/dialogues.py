"""The turns of a row that models answer, each after the row's own turns before it."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from vlmflow.evaluation.choice import Case
from vlmflow.evaluation.scoring.answer_text import answer_in
from vlmflow.rows.chat import Turn


@dataclass(frozen=True)
class Question:
    """A turn to answer. key: a digest of turns and pictures. row: the row's id. rounds: human turns after the first.

    turns: from the first, also of system, to the human's that is answered. images: names in the picture store.
    reference: the row's own answer. gold: the right one.
    """

    key: str
    row: str
    rounds: int
    turns: Sequence[Turn]
    images: Sequence[str]
    reference: str
    gold: str


def questions_of(case: Case, rounds: int, feedback: bool, gold: str | None = None) -> list[Question]:
    """Return the questions of a row: the first, and one after each of its first `rounds` rounds.

    feedback: whether the row's later human turns are feedback, so that one answer is right for all turns. gold: this
    answer, if the raw row has it; otherwise it is that of the last turn.
    """
    found = []
    for place in range(0, min(len(case.turns), 2 * rounds + 2), 2):
        shown = case.row.until(len(case.system) + place + 1)
        reference = case.turns[place + 1].value
        right = (gold or case.answer) if feedback else reference
        content = msgspec.json.encode([shown.conversations, case.pictures[: len(shown.images)]])
        found.append(
            Question(
                key=hashlib.sha256(content).hexdigest()[:32],
                row=case.row.id,
                rounds=place // 2,
                turns=shown.conversations,
                images=shown.images,
                reference=reference,
                gold=answer_in(right) or right.strip(),
            )
        )
    return found
