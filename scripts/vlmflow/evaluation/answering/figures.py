"""From answers to figures: how many are right after k rounds of feedback, and what became of the first answers."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from operator import attrgetter
from statistics import fmean

import numpy as np

from vlmflow.evaluation.accounts import Interval
from vlmflow.evaluation.answering.accounts import (
    AfterRounds,
    AnsweredRow,
    AnsweredTurn,
    Change,
    ModelAnswer,
    ModelFigures,
)
from vlmflow.evaluation.intervals import (
    Bounds,
    Groups,
    Values,
    difference_interval,
    intervals_of,
    mean_interval,
    share_interval,
)

Pick = Callable[[AnsweredTurn], ModelAnswer]
"""Takes the answer of one of the models."""

BASE: Pick = attrgetter("base")
TUNED: Pick = attrgetter("tuned")

Kind = Callable[[Values, Groups], Bounds]
"""Computes an interval (`intervals`)."""


def figures_after_rounds(rows: Sequence[AnsweredRow], feedback: bool) -> list[AfterRounds]:
    """Return the figures of both models after 0, 1, … rounds, each over the rows that have so many.

    feedback: whether there are transitions.
    """
    most = max(len(row.turns) for row in rows)
    return [_after(rounds, [row for row in rows if len(row.turns) > rounds], feedback) for rounds in range(most)]


def figures_by(
    rows: Sequence[AnsweredRow], kinds_of: Callable[[AnsweredRow], Iterable[Hashable]], feedback: bool
) -> dict[str, list[AfterRounds]]:
    """Return the figures of every kind of rows, sorted by its name. kinds_of: gives those to which a row belongs."""
    kinds: dict[str, list[AnsweredRow]] = defaultdict(list)
    for row in rows:
        for kind in kinds_of(row):
            kinds[str(kind)].append(row)
    return {name: figures_after_rounds(some, feedback) for name, some in sorted(kinds.items())}


def _after(rounds: int, rows: Sequence[AnsweredRow], feedback: bool) -> AfterRounds:
    groups = [row.group for row in rows]
    base, tuned = ([pick(row.turns[rounds]) for row in rows] for pick in (BASE, TUNED))
    pairs = list(zip(base, tuned, strict=True))
    return AfterRounds(
        rounds=rounds,
        rows=len(rows),
        groups=len(set(groups)),
        base=_figures(rounds, rows, BASE, feedback),
        tuned=_figures(rounds, rows, TUNED, feedback),
        right=_mean(difference_interval, [float(ours.right) - float(theirs.right) for theirs, ours in pairs], groups),
        anls=_mean(mean_interval, [ours.anls - theirs.anls for theirs, ours in pairs], groups),
    )


def _figures(rounds: int, rows: Sequence[AnsweredRow], pick: Pick, feedback: bool) -> ModelFigures:
    answers = [pick(row.turns[rounds]) for row in rows]
    groups = [row.group for row in rows]
    changes = feedback and rounds > 0
    return ModelFigures(
        right=_mean(share_interval, [float(answer.right) for answer in answers], groups),
        exact_match=fmean(answer.exact_match for answer in answers),
        token_f1=fmean(answer.token_f1 for answer in answers),
        anls=_mean(mean_interval, [answer.anls for answer in answers], groups),
        relaxed_accuracy=fmean(answer.relaxed_accuracy for answer in answers),
        words=fmean(len(answer.answer.split()) for answer in answers),
        cut=sum(answer.cut for answer in answers),
        corrected=_change(rounds, rows, pick, False) if changes else None,
        spoiled=_change(rounds, rows, pick, True) if changes else None,
    )


def _change(rounds: int, rows: Sequence[AnsweredRow], pick: Pick, right_first: bool) -> Change:
    """Return what became of the first answers that were right, or wrong, after k rounds."""
    some = [row for row in rows if pick(row.turns[0]).right == right_first]
    changed = [pick(row.turns[rounds]).right != right_first for row in some]
    rate = _mean(share_interval, [float(each) for each in changed], [row.group for row in some]) if some else None
    return Change(len(some), sum(changed), rate)


def _mean(kind: Kind, values: Sequence[float], groups: Sequence[str]) -> Interval:
    return intervals_of(kind(np.array(values)[:, None], Groups(groups)))[0]
