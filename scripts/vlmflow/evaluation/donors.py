"""The placebo of a row: the feedback of another row that could have been its own.

What a model gains from its own feedback may come from the presence of feedback, not from its content. Against the
feedback of a donor only the content counts. A donor has the same source, as many turns of feedback, and the same score
on the answer before the last; another picture (without pictures another question) and another right answer; of these,
the row whose feedback is nearest in tokens. A row's right answers are its last one and, where the raw row has it beside
its turns, the gold answer: sentences that differ may say the same.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from random import Random

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


def find_donors(
    cases: Sequence[Case], tokens: Mapping[str, int], gold: Mapping[str, str], seed: int
) -> dict[str, Case]:
    """Return the donor of every row that has one, by the row's id.

    cases: all rows with feedback of a split; each may give and receive. tokens: those of a row's feedback, by its id.
    gold: the gold answers that raw rows have, likewise. seed: decides between donors that are equally near.
    """
    random = Random(seed)  # noqa: S311 (drawn, not secret)
    alike: dict[tuple[object, ...], list[tuple[int, float, Case]]] = defaultdict(list)
    for case in cases:
        kind = (case.row.source, len(case.feedback), case.score)
        alike[kind].append((tokens[case.row.id], random.random(), case))
    found: dict[str, Case] = {}
    for some in alike.values():
        some.sort(key=lambda each: each[:2])
        right = [_right_answers(case, gold) for _, _, case in some]
        runs = _runs(right)
        for place in range(len(some)):
            donor = _nearest(some, right, runs, place)
            if donor is not None:
                found[some[place][2].row.id] = donor
    return found


def _right_answers(case: Case, gold: Mapping[str, str]) -> frozenset[str]:
    texts = [case.answer, *([gold[case.row.id]] if case.row.id in gold else [])]
    return frozenset(normalised(answer_in(text)) for text in texts)


def _runs(right: Sequence[frozenset[str]]) -> list[tuple[int, int]]:
    """Return, by place, the first and last place of the neighbours with the same right answers."""
    found: list[tuple[int, int]] = []
    for _, same in groupby(enumerate(right), key=lambda each: each[1]):
        places = [place for place, _ in same]
        found += [(places[0], places[-1])] * len(places)
    return found


def _nearest(
    some: Sequence[tuple[int, float, Case]],
    right: Sequence[frozenset[str]],
    runs: Sequence[tuple[int, int]],
    place: int,
) -> Case | None:
    """Return the nearest row in tokens with another group and no right answer in common. some: sorted by tokens.

    runs: neighbours with the same right answers, which it passes at one step: most rows may say yes.
    """
    own_tokens, _, own = some[place]
    down, up = place - 1, place + 1
    while down >= 0 or up < len(some):
        below = own_tokens - some[down][0] if down >= 0 else None
        above = some[up][0] - own_tokens if up < len(some) else None
        take_below = above is None or (below is not None and below <= above)
        candidate = down if take_below else up
        other_answer = right[candidate].isdisjoint(right[place])
        if other_answer and some[candidate][2].group != own.group:
            return some[candidate][2]
        first, last = (candidate, candidate) if other_answer else runs[candidate]
        down, up = (first - 1, up) if take_below else (down, last + 1)
    return None


def without_donor(case: Case) -> LeftOut:
    """Return a row for which no other one is left whose feedback could be its control."""
    scores = f" and scores {', '.join(f'{score:g}' for score in case.row.scores)}" if case.row.scores else ""
    return LeftOut(
        case.row.id,
        "no_donor",
        f"no other row of source {case.row.source} with {len(case.feedback)} turns of feedback{scores} is left that "
        "has another picture or question, another right answer and other feedback",
    )


def without_other_picture(case: Case) -> LeftOut:
    """Return a row for which no other one is left whose pictures could be their control."""
    return LeftOut(
        case.row.id,
        "no_other_picture",
        f"no other row of source {case.row.source} with {len(case.pictures)} pictures is left that has other pictures "
        "and another right answer",
    )
