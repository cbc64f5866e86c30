"""Gives each item another one as partner, so that each is given once and takes once: a derangement of the nearest.

If one item served many, their results would hang together, and intervals would be too narrow.

The controls of a row: the feedback and the picture of other rows, that could have been its own.

What a model gains from its own feedback may come from the presence of feedback, not from its content. Against the
feedback of another row only the content counts. A row's right answers are its last one and, where the raw row has it
beside its turns, the gold answer: sentences that differ may say the same.
"""

import hashlib
import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from scipy.sparse import csr_matrix

from vlmflow.evaluation.choice import Case
from vlmflow.evaluation.report import LeftOut
from vlmflow.evaluation.scoring.stated import answer_in, normalised

LARGEST = 3000
"""More items of a stratum are split into parts of at most so many: time and memory grow with the square."""

WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Item:
    """Something that takes a partner and is one.

    name: unique. stratum: partners have the same. apart: partners have none of these in common. words: partners have
    many of these in common.
    """

    name: str
    stratum: Hashable
    apart: frozenset[str]
    words: frozenset[str]


def words_of(texts: Iterable[str]) -> frozenset[str]:
    """Return the words of some texts, in one letter case."""
    return frozenset(word for text in texts for word in WORD.findall(text.casefold()))


def derange(items: Sequence[Item], seed: int) -> dict[str, str]:
    """Return the partner of every item that has one, by their names.

    Who gives also takes, each once. As many items as possible have a partner, and of all such choices this one has the
    smallest distance in sum (the assignment problem; Crouse, On implementing 2D rectangular assignment algorithms,
    2016). The distance of two items is the share of their words that only one has, rare words weighing more (weighted
    by log(items / items with the word); Jaccard), so that topics agree.

    seed: decides where strata are split, and between choices that are equally good. The order of items does not count.
    """
    strata: dict[Hashable, list[Item]] = defaultdict(list)
    for item in sorted(items, key=lambda item: hashlib.sha256(f"{seed}\0{item.name}".encode()).digest()):
        strata[item.stratum].append(item)
    found: dict[str, str] = {}
    for some in strata.values():
        for part in np.array_split(np.arange(len(some)), -(-len(some) // LARGEST)):
            found |= _nearest_partners([some[place] for place in part])
    return found


def _nearest_partners(items: Sequence[Item]) -> dict[str, str]:
    cost = _distances([item.words for item in items])
    apart = _incidence([item.apart for item in items])
    cost[(apart @ apart.T).nonzero()] = np.inf
    # An item may stay with itself, and is then left out; this costs more than all distances together.
    np.fill_diagonal(cost, len(items) + 1)
    takers, givers = linear_sum_assignment(cost)
    pairs = zip(takers.tolist(), givers.tolist(), strict=True)
    return {items[taker].name: items[giver].name for taker, giver in pairs if taker != giver}


def _distances(words: Sequence[frozenset[str]]) -> NDArray[np.float64]:
    has = _incidence(words)
    weights = np.log(len(words) / np.bincount(has.indices, minlength=has.shape[1]))
    shared = (has.multiply(weights).tocsr() @ has.T).toarray()
    own = shared.diagonal()
    either = np.add.outer(own, own) - shared
    found: NDArray[np.float64] = 1 - np.divide(shared, either, out=np.zeros_like(shared), where=either > 0)
    return found


def _incidence(sets: Sequence[frozenset[str]]) -> csr_matrix:
    """Return a matrix with a row per set and a column per member."""
    numbers: dict[str, int] = {}
    # Sorted, as sums of floats in another order may differ, and then so may the choice.
    columns = [numbers.setdefault(member, len(numbers)) for some in sets for member in sorted(some)]
    starts = np.cumsum([0, *map(len, sets)])
    return csr_matrix((np.ones(len(columns)), columns, starts), shape=(len(sets), len(numbers)))


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
