"""Which rows are evaluated, and the controls of each: the feedback and the picture of other rows, as if its own.

What a model gains from its own feedback may come from the presence of feedback, not from its content. Against the
feedback of other rows only the content counts. Each row gives its feedback up to three times and takes others' as often
(derangements): if one row served many, their results would hang together, and intervals would be too narrow.
"""

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vlmflow.config.settings import GOOD
from vlmflow.evaluation.report import OTHERS, LeftOut
from vlmflow.evaluation.scoring.stated import answer_in, normalised
from vlmflow.rows.chat import CALLS, Turn, dialogue_start
from vlmflow.rows.holdout import group_of
from vlmflow.rows.raw_text import SINGLE_TURN
from vlmflow.rows.sharegpt import ShareGptRow
from vlmflow.rows.trajectories import parted_feedback

ATTEMPT = re.compile(r"-a(\d+)$")
"""The attempt at the end of an id in the timestep form (`trajectories.timestep_rows`)."""

WRONG_TO = 5
"""The score up to which an attempt is wrong; from GOOD on it is right."""

DONORS = len(OTHERS)
"""Three find five points of *uses feedback* in 300 rows in 56 % of draws, one in 29 %, and five in 65 %."""

LARGEST = 3000
"""More items of a stratum are split into parts of at most so many: time and memory grow with the square."""

SCRIPTS_WITHOUT_BLANKS = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
WORD = re.compile(rf"[{SCRIPTS_WITHOUT_BLANKS}]|[^\W{SCRIPTS_WITHOUT_BLANKS}]+")
"""A word; of Chinese and Japanese, which have no blanks between words, a character."""

ECHO = 2.0
"""A word is an echo if it is so many times as likely in right answers whose feedback has it as in the others."""


@dataclass(frozen=True)
class Case:
    """A row that can be evaluated.

    group: see `halves.group_of`. pictures: the SHA-256 of its pictures. wrong: the answer with which its last, right
    one is compared (`with_right_last`); None if there is none.
    """

    row: ShareGptRow
    group: str
    pictures: tuple[str, ...] = ()
    wrong: str | None = None

    @property
    def turns(self) -> list[Turn]:
        """The dialogue, without a turn from system."""
        return self.row.conversations[dialogue_start(self.row.conversations) :]

    @property
    def system(self) -> list[Turn]:
        """The system prompt as a list of one turn; [] for a row without one."""
        return self.row.conversations[: dialogue_start(self.row.conversations)]

    @property
    def feedback(self) -> list[str]:
        """The human's turns after the question: one on each answer but the last. A row with calls has no feedback."""
        called = any(turn.speaker == CALLS for turn in self.turns)
        return [] if called else [turn.value for turn in self.turns[2::2]]

    @property
    def answer(self) -> str:
        """The text of the last turn, the answer that is scored."""
        return self.turns[-1].value


def read_case(row: ShareGptRow, pictures: Mapping[str, str], one_prompt: bool = False) -> Case:
    """Return a row with its group. pictures: the SHA-256 of every picture, by its name in the store; see `group_of`."""
    return Case(row, group_of(row, pictures, one_prompt), tuple(pictures[name] for name in row.images))


def with_right_last(case: Case) -> Case | LeftOut:
    """Return a row with feedback cut after its right answer, with the wrong one with which that is compared.

    right: the last answer that scored GOOD or more; it must follow feedback. wrong: the first before it that
    scored WRONG_TO or less. In a row without scores the last answer is right, and none is wrong.
    """
    scores = case.row.scores
    if not scores:
        return case
    texts = [turn.value for turn in case.turns[1::2]]
    answers = [answer_in(text) for text in texts]
    right = max((number for number, score in enumerate(scores) if score >= GOOD and answers[number]), default=0)
    if not right:
        return LeftOut(case.row.id, "no_right", f"scores {_listed(scores)}: none after feedback is {GOOD} or more")
    candidates = (number for number, score in enumerate(scores[:right]) if score <= WRONG_TO and answers[number])
    wrong = next(candidates, None)
    if wrong is None:
        return LeftOut(case.row.id, "no_wrong", f"scores {_listed(scores)}: none before is {WRONG_TO} or less")
    if normalised(answers[wrong]) == normalised(answers[right]):
        detail = f"the answer that scored {scores[wrong]:g} says the same as the right one"
        return LeftOut(case.row.id, "no_wrong", detail)
    row = case.row.until(len(case.system) + 2 * right + 2)
    return replace(case, row=row, pictures=case.pictures[: len(row.images)], wrong=texts[wrong])


def _listed(scores: Iterable[float]) -> str:
    return ", ".join(f"{score:g}" for score in scores)


def parted(
    cases: Sequence[Case], stays: Callable[[Case], bool], reason: str, detail: str
) -> tuple[list[Case], list[LeftOut]]:
    """Return the rows that stay, and the others as left out. reason, detail: why (`LeftOut`)."""
    out = [LeftOut(case.row.id, reason, detail) for case in cases if not stays(case)]
    return [case for case in cases if stays(case)], out


def without_single_turns(cases: Sequence[Case]) -> tuple[list[Case], list[LeftOut]]:
    """Return the rows of whole trajectories, and those that repeat one of their answers (`single_turn`) as left out."""
    why = "the row of its trajectory has this question and answer"
    return parted(cases, lambda case: not case.row.id.endswith(SINGLE_TURN), "single_turn", why)


def last_attempts(cases: Sequence[Case]) -> tuple[list[Case], list[LeftOut]]:
    """Return the last row of every trajectory of the timestep form, and the earlier ones as left out.

    A trajectory of that form is one row per attempt. Their last answers are right only in the last row.
    """
    newest: dict[str, tuple[int, Case]] = {}
    for case in cases:
        attempt = ATTEMPT.search(case.row.id)
        number, trajectory = (int(attempt[1]), case.row.id[: attempt.start()]) if attempt else (0, case.row.id)
        if trajectory not in newest or number > newest[trajectory][0]:
            newest[trajectory] = number, case
    kept = {case.row.id for _, case in newest.values()}
    why = "the trajectory has a row with a later attempt"
    return parted(cases, lambda case: case.row.id in kept, "earlier_attempt", why)


def of_groups(cases: Sequence[Case], groups: frozenset[str]) -> tuple[list[Case], list[LeftOut]]:
    """Return the rows of one half of val (`halves.half_of`), and the others as left out."""
    return parted(cases, lambda case: case.group in groups, "other_half", "one half of val chooses, the other judges")


def draw(cases: Iterable[Case], rows: int, seed: int, key: str) -> tuple[list[Case], list[LeftOut]]:
    """Draw whole groups until there are at least `rows` rows, or all; returns the others as left out.

    key: the one of the configuration that says how many rows, for the reason. The drawn rows are in the order of
    `cases`. With the same seed more rows include the fewer.
    """
    cases = list(cases)
    groups: dict[str, list[Case]] = defaultdict(list)
    for case in cases:
        groups[case.group].append(case)
    names = sorted(groups)
    Random(seed).shuffle(names)  # noqa: S311 (drawn, not secret)
    drawn: set[str] = set()
    count = 0
    for name in names:
        if count >= rows:
            break
        drawn.add(name)
        count += len(groups[name])
    return parted(cases, lambda case: case.group in drawn, "not_drawn", f"{rows} rows were to be drawn ({key})")


@dataclass(frozen=True)
class Item:
    """Something that takes a partner and is one.

    name: unique. stratum: partners have the same. has: what keeps partners apart. refuses: what its partner must not
    have. words: partners have many of these in common.
    """

    name: str
    stratum: Hashable
    has: frozenset[str]
    refuses: frozenset[str]
    words: frozenset[str]


def feedback_donors(cases: Iterable[Case], gold: Mapping[str, str], seed: int) -> dict[str, list[Case]]:
    """Return the rows whose feedback is a control of a row's own, by the row's id; a row without one is not there.

    A row has up to DONORS. For each of them all rows give and take once (`derange`), within the same source, number of
    rounds and scores; from another group, with another right answer, and with feedback that the row neither has nor was
    given: equal feedback tells nothing apart. Of these, nearest in the words of question and feedback, so that the
    topic does not give the own feedback away.

    cases: all rows with feedback of a split. gold: the gold answers that raw rows have, by the ids of rows. seed: of
    `derange`.
    """
    given: dict[str, list[Case]] = {}

    def feedback_of(case: Case) -> str:
        return f"feedback {' '.join(' '.join(case.feedback).casefold().split())}"

    def item(case: Case) -> Item:
        stratum = (case.row.source, len(case.feedback), tuple(case.row.scores))
        words = words_of([case.turns[0].value, *case.feedback])
        has = _apart(case, gold) | {feedback_of(case)}
        return Item(case.row.id, stratum, has, has.union(map(feedback_of, given.get(case.row.id, []))), words)

    cases = list(cases)
    for _ in range(DONORS):
        for name, donor in _partners(cases, item, seed).items():
            given.setdefault(name, []).append(donor)
    return given


def picture_donors(cases: Iterable[Case], gold: Mapping[str, str], seed: int) -> dict[str, Case]:
    """Return the row whose pictures are the control of a row's own, by the row's id; a row without one is not there.

    As a donor of `feedback_donors`, within the same source and number of pictures, and nearest in the words of the
    question.

    cases: all rows of a split; those without a picture have no partner.
    """

    def item(case: Case) -> Item:
        stratum, apart = (case.row.source, len(case.pictures)), _apart(case, gold)
        return Item(case.row.id, stratum, apart, apart, words_of([case.turns[0].value]))

    return _partners([case for case in cases if case.pictures], item, seed)


def _partners(cases: Iterable[Case], item: Callable[[Case], Item], seed: int) -> dict[str, Case]:
    by_name = {case.row.id: case for case in cases}
    partners = derange([item(case) for case in by_name.values()], seed)
    return {name: by_name[partner] for name, partner in partners.items()}


def _apart(case: Case, gold: Mapping[str, str]) -> frozenset[str]:
    """Return what a partner must not have: its group, and its right answers.

    These are the last one and, where the raw row has it beside its turns, the gold answer: sentences that differ may
    say the same.
    """
    texts = [case.answer, *([gold[case.row.id]] if case.row.id in gold else [])]
    return frozenset([f"group {case.group}", *(f"answer {normalised(answer_in(text))}" for text in texts)])


def echoes(cases: Sequence[Case]) -> dict[str, list[str]]:
    """Return the words that a row's right answer has from its feedback alone, by the row's id; sorted.

    Feedback on a wrong answer is older than the right one, which may just repeat its words. Such a word stands in the
    feedback, and neither in the question nor in an attempt; and over all rows right answers have it at least ECHO times
    as often where their feedback has it as where it has not. Half a row is added to each count, so that a word of one
    row is an echo of it, and "the" is none.

    cases: all rows with feedback of a split.
    """
    rights = [words_of([answer_in(case.answer) or case.answer]) for case in cases]
    feedbacks = [words_of(parted_feedback(text)[1] for text in case.feedback) for case in cases]
    in_right, in_feedback, in_both = (
        Counter(chain.from_iterable(sets)) for sets in (rights, feedbacks, map(frozenset.__and__, rights, feedbacks))
    )

    def is_echo(word: str) -> bool:
        with_it, without_it = in_feedback[word], len(cases) - in_feedback[word]
        often = (in_both[word] + 0.5) / (with_it + 1)
        return often >= ECHO * (in_right[word] - in_both[word] + 0.5) / (without_it + 1)

    said = {}
    for case, right, feedback in zip(cases, rights, feedbacks, strict=True):
        known = words_of(turn.value for turn in [*case.system, case.turns[0], *case.turns[1:-1:2]])
        said[case.row.id] = sorted(word for word in (right & feedback) - known if is_echo(word))
    return said


def neutral_feedback(case: Case, texts: Sequence[str]) -> list[str]:
    """Return feedback that only says that the answer is wrong, for each of a row's: in its form and with its score.

    texts: of which the row has one, by its id.
    """
    text = texts[int(hashlib.sha256(case.row.id.encode()).hexdigest(), 16) % len(texts)]
    return [parted_feedback(feedback)[0] + text for feedback in case.feedback]


def without_donor(case: Case) -> LeftOut:
    """Return a row for which no other one is left whose feedback could be its control."""
    scores = f" and scores {_listed(case.row.scores)}" if case.row.scores else ""
    return LeftOut(
        case.row.id,
        "no_donor",
        f"no other row of source {case.row.source} with {len(case.feedback)} turns of feedback{scores} is left that "
        "has another picture or question, another right answer and other feedback",
    )


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
    partners: dict[str, str] = {}
    for some in strata.values():
        for part in np.array_split(np.arange(len(some)), -(-len(some) // LARGEST)):
            partners |= _nearest_partners([some[number] for number in part])
    return partners


def _nearest_partners(items: Sequence[Item]) -> dict[str, str]:
    from scipy.optimize import linear_sum_assignment  # pages and trackers import this module without scipy

    cost = _distances([item.words for item in items])
    both = _incidence([item.refuses for item in items] + [item.has for item in items])
    cost[(both[: len(items)] @ both[len(items) :].T).nonzero()] = np.inf
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
    distances: NDArray[np.float64] = 1 - np.divide(shared, either, out=np.zeros_like(shared), where=either > 0)
    return distances


def _incidence(sets: Sequence[frozenset[str]]) -> Any:
    """Return a sparse matrix with a row per set and a column per member."""
    from scipy.sparse import csr_matrix

    numbers: dict[str, int] = {}
    # Sorted, as sums of floats in another order may differ, and then so may the choice.
    columns = [numbers.setdefault(member, len(numbers)) for some in sets for member in sorted(some)]
    starts = np.cumsum([0, *map(len, sets)])
    return csr_matrix((np.ones(len(columns)), columns, starts), shape=(len(sets), len(numbers)))
