"""The turns of a row that models answer, each after the row's own turns before it.

In a row with tools these are all places where its assistant speaks: an answer may be calls, and answer a response.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from vlmflow.evaluation.choice import Case
from vlmflow.evaluation.scoring.answer_text import answer_in
from vlmflow.rows.chat import Turn, places_answered
from vlmflow.rows.tools import as_written


@dataclass(frozen=True)
class Question:
    """A turn to answer. key: a digest of turns, pictures and tools. row: the row's id. rounds: answers before it.

    turns: from the first, also of system, to the one that is answered. images: names in the picture store.
    reference: the row's own answer. gold: the right one. tools: as in a row.
    """

    key: str
    row: str
    rounds: int
    turns: Sequence[Turn]
    images: Sequence[str]
    reference: str
    gold: str
    tools: str = ""


def questions_of(case: Case, rounds: int, feedback: bool, gold: str | None = None) -> list[Question]:
    """Return the questions of a row: the first, and one after each of its first `rounds` answers.

    feedback: whether the row's later human turns are feedback, so that one answer is right for all turns. gold: this
    answer, if the raw row has it; otherwise it is that of the last turn.
    """
    found = []
    tools = [case.row.tools] if case.row.tools else []
    for number, (first, end) in enumerate(places_answered(case.row.conversations)[: rounds + 1]):
        shown = case.row.until(first)
        reference = "\n".join(as_written(case.row.conversations[first:end]))
        right = (gold or case.answer) if feedback else reference
        content = msgspec.json.encode([shown.conversations, case.pictures[: len(shown.images)], *tools])
        found.append(
            Question(
                key=hashlib.sha256(content).hexdigest()[:32],
                row=case.row.id,
                rounds=number,
                turns=shown.conversations,
                images=shown.images,
                reference=reference,
                gold=answer_in(right) or right.strip(),
                tools=case.row.tools,
            )
        )
    return found
