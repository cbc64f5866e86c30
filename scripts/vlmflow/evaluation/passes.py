"""The conversations whose last answers are scored: what a row becomes for the models."""

from vlmflow.evaluation.accounts import ANSWER, FIRST, HISTORY, PLACEBO, QUESTION
from vlmflow.evaluation.choice import Case
from vlmflow.rows.chat import Turn

Passes = dict[str, list[Turn]]


def passes_with_feedback(case: Case, donor: Case) -> Passes:
    """Return the four conversations of a row with feedback; the scored answer of the first three is the same.

    donor: the row whose feedback is the placebo, with as many turns of it.
    """
    question, answer = case.turns[0], case.turns[-1]
    placebo = list(case.turns)
    placebo[2::2] = donor.turns[2::2]
    conversations = {
        HISTORY: case.turns,
        QUESTION: [question, answer],
        PLACEBO: placebo,
        FIRST: case.turns[:2],
    }
    return {name: [*case.system, *turns] for name, turns in conversations.items()}


def passes_without_feedback(case: Case) -> Passes:
    """Return the one conversation of a row without feedback."""
    return {ANSWER: case.row.conversations}
