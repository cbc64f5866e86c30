"""The conversations whose last answers are scored: what a row becomes for the models."""

from msgspec import UNSET

from vlmflow.evaluation.accounts import OTHER, OTHER_PICTURE, OWN, QUESTION, Loss, Margin
from vlmflow.evaluation.answer_losses import Pass
from vlmflow.evaluation.choice import Case
from vlmflow.evaluation.scoring.answer_text import answer_in
from vlmflow.rows.answer_mark import after_mark
from vlmflow.rows.chat import Turn, tags_in, without_tags

RIGHT, WRONG = "right", "wrong"

BEGINNING = "Answer:"
"""Where answers have a thought before this mark, all that is scored begins with it: the thought was written after the
feedback was read, and speaks of it."""


def passes_of(case: Case, donor: Case | None, picture_donor: Case | None) -> dict[str, Pass]:
    """Return the conversations of a row, by context and answer (`margins_of`).

    donor: the row whose feedback is the control, with as many turns of it, without its pictures; None in a data set
    without feedback.
    picture_donor: the row whose pictures are the control, with as many; None if there is none.
    """
    contexts = {QUESTION: case.turns[:-1]} if donor is None else {QUESTION: case.turns[:1], OWN: case.turns[:-1]}
    if donor is not None:
        contexts[OTHER] = list(case.turns[:-1])
        others = donor.turns[2 : len(case.turns) - 1 : 2]
        contexts[OTHER][2::2] = [Turn(turn.speaker, without_tags(turn.value)) for turn in others]
    pictures = dict.fromkeys(contexts, case.row.images)
    if picture_donor is not None:
        contexts[OTHER_PICTURE] = contexts[QUESTION] if donor is None else contexts[OWN]
        pictures[OTHER_PICTURE] = picture_donor.row.images
    answers = {RIGHT: case.turns[-1]} if donor is None else scored_answers(case)
    given = BEGINNING if donor is not None and answers[RIGHT].value.startswith(BEGINNING) else ""
    if donor is not None:  # what the training left out of the loss is history like all else
        contexts = {each: [Turn(turn.speaker, turn.value) for turn in turns] for each, turns in contexts.items()}
    return {
        f"{context} {which}": Pass(
            [*case.system, *before, answer], pictures[context][: tags_in(before)], given, case.row.tools or UNSET
        )
        for context, before in contexts.items()
        for which, answer in answers.items()
    }


def scored_answers(case: Case) -> dict[str, Turn]:
    """Return the right and the wrong answer of a row with feedback, without thoughts, in the same form."""
    texts = {RIGHT: case.answer} | ({} if case.wrong is None else {WRONG: case.wrong})
    marked = all(after_mark(text) is not None for text in texts.values())
    begins = f"{BEGINNING} " if marked else ""
    return {which: Turn("gpt", begins + (answer_in(text) or text)) for which, text in texts.items()}


def margins_of(losses: dict[str, Loss]) -> dict[str, Margin]:
    """Return the margins by context. losses: by the names of `passes_of`."""
    contexts = dict.fromkeys(name.split()[0] for name in losses)
    return {each: Margin(losses[f"{each} {RIGHT}"], losses.get(f"{each} {WRONG}")) for each in contexts}
