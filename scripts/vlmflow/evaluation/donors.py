"""The controls of a row: the feedback and the picture of other rows, that could have been its own.

What a model gains from its own feedback may come from the presence of feedback, not from its content. Against the
feedback of another row only the content counts. A row's right answers are its last one and, where the raw row has it
beside its turns, the gold answer: sentences that differ may say the same.
"""

from collections.abc import Callable, Iterable, Mapping

from vlmflow.evaluation.accounts import LeftOut
from vlmflow.evaluation.choice import Case
from vlmflow.evaluation.derangement import Item, derange, words_of
from vlmflow.evaluation.scoring.answer_text import answer_in, normalised


def feedback_donors(cases: Iterable[Case], gold: Mapping[str, str], seed: int) -> dict[str, Case]:
    """Return the row whose feedback is the control of a row's own, by the row's id; a row without one is not there.

    Each row gives and takes once (`derange`), within the same source, number of rounds and scores; from another group,
    with another right answer, and with other feedback: equal feedback tells nothing apart. Of these, nearest in the
    words of question and feedback, so that the topic does not give the own feedback away.

    cases: all rows with feedback of a split. gold: the gold answers that raw rows have, by the ids of rows. seed: of
    `derange`.
    """

    def item(case: Case) -> Item:
        said = " ".join(" ".join(case.feedback).casefold().split())
        stratum = (case.row.source, len(case.feedback), tuple(case.row.scores))
        words = words_of([case.turns[0].value, *case.feedback])
        return Item(case.row.id, stratum, _apart(case, gold) | {f"feedback {said}"}, words)

    return _partners(cases, item, seed)


def picture_donors(cases: Iterable[Case], gold: Mapping[str, str], seed: int) -> dict[str, Case]:
    """Return the row whose pictures are the control of a row's own, by the row's id; a row without one is not there.

    As `feedback_donors`, within the same source and number of pictures, and nearest in the words of the question.

    cases: all rows of a split; those without a picture have no partner.
    """

    def item(case: Case) -> Item:
        stratum = (case.row.source, len(case.pictures))
        return Item(case.row.id, stratum, _apart(case, gold), words_of([case.turns[0].value]))

    return _partners([case for case in cases if case.pictures], item, seed)


def _partners(cases: Iterable[Case], item: Callable[[Case], Item], seed: int) -> dict[str, Case]:
    by_name = {case.row.id: case for case in cases}
    found = derange([item(case) for case in by_name.values()], seed)
    return {name: by_name[partner] for name, partner in found.items()}


def _apart(case: Case, gold: Mapping[str, str]) -> frozenset[str]:
    """Return what a partner must not have: its group, and its right answers."""
    return frozenset([f"group {case.group}", *(f"answer {answer}" for answer in _right_answers(case, gold))])


def _right_answers(case: Case, gold: Mapping[str, str]) -> frozenset[str]:
    texts = [case.answer, *([gold[case.row.id]] if case.row.id in gold else [])]
    return frozenset(normalised(answer_in(text)) for text in texts)


def without_donor(case: Case) -> LeftOut:
    """Return a row for which no other one is left whose feedback could be its control."""
    scores = f" and scores {', '.join(f'{score:g}' for score in case.row.scores)}" if case.row.scores else ""
    return LeftOut(
        case.row.id,
        "no_donor",
        f"no other row of source {case.row.source} with {len(case.feedback)} turns of feedback{scores} is left that "
        "has another picture or question, another right answer and other feedback",
    )
