"""From answers to figures: how many are right after k rounds of feedback, and what became of the first answers."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from statistics import fmean

from vlmflow.evaluation.accounts import Interval
from vlmflow.evaluation.answering.accounts import (
    AfterRounds,
    AnsweredRow,
    AnsweredTurn,
    Change,
    ModelAnswer,
    ModelFigures,
)
from vlmflow.evaluation.bootstrap import interval
from vlmflow.evaluation.figures import FEWEST_ROWS

Pick = Callable[[AnsweredTurn], ModelAnswer]
"""Takes the answer of one of the models."""

Mean = Callable[[Sequence[float], Sequence[str]], Interval]
"""Takes a value and a group per row; returns the mean with its interval."""


def figures_after_rounds(
    rows: Sequence[AnsweredRow], seed: int, feedback: bool, intervals: bool = True
) -> list[AfterRounds]:
    """Return the figures of both models after 0, 1, … rounds, each over the rows that have so many.

    seed: of the intervals. feedback: whether there are transitions. intervals: whether to compute them.
    """

    def mean(values: Sequence[float], groups: Sequence[str]) -> Interval:
        return interval(values, groups, seed) if intervals else Interval(fmean(values), None, None)

    most = max(len(row.turns) for row in rows)
    return [_after(rounds, [row for row in rows if len(row.turns) > rounds], feedback, mean) for rounds in range(most)]


def figures_by(
    rows: Sequence[AnsweredRow], kind: Callable[[AnsweredRow], Hashable], seed: int, feedback: bool
) -> dict[str, list[AfterRounds]]:
    """Return the figures of every kind of rows, sorted by its name; intervals only where a kind has enough rows."""
    kinds: dict[str, list[AnsweredRow]] = defaultdict(list)
    for row in rows:
        kinds[str(kind(row))].append(row)
    return {
        name: figures_after_rounds(some, seed, feedback, intervals=len(some) >= FEWEST_ROWS)
        for name, some in sorted(kinds.items())
    }


def _after(rounds: int, rows: Sequence[AnsweredRow], feedback: bool, mean: Mean) -> AfterRounds:
    groups = [row.group for row in rows]
    base, tuned = ([pick(row.turns[rounds]) for row in rows] for pick in (_base, _tuned))
    pairs = list(zip(base, tuned, strict=True))
    return AfterRounds(
        rounds=rounds,
        rows=len(rows),
        groups=len(set(groups)),
        base=_figures(rounds, rows, _base, feedback, mean),
        tuned=_figures(rounds, rows, _tuned, feedback, mean),
        right=mean([float(ours.right) - float(theirs.right) for theirs, ours in pairs], groups),
        anls=mean([ours.anls - theirs.anls for theirs, ours in pairs], groups),
    )


def _figures(rounds: int, rows: Sequence[AnsweredRow], pick: Pick, feedback: bool, mean: Mean) -> ModelFigures:
    answers = [pick(row.turns[rounds]) for row in rows]
    groups = [row.group for row in rows]
    changes = feedback and rounds > 0
    return ModelFigures(
        right=mean([float(answer.right) for answer in answers], groups),
        exact_match=fmean(answer.exact_match for answer in answers),
        token_f1=fmean(answer.token_f1 for answer in answers),
        anls=mean([answer.anls for answer in answers], groups),
        relaxed_accuracy=fmean(answer.relaxed_accuracy for answer in answers),
        words=fmean(len(answer.answer.split()) for answer in answers),
        cut=sum(answer.cut for answer in answers),
        corrected=_change(rounds, rows, pick, False, mean) if changes else None,
        spoiled=_change(rounds, rows, pick, True, mean) if changes else None,
    )


def _change(rounds: int, rows: Sequence[AnsweredRow], pick: Pick, right_first: bool, mean: Mean) -> Change:
    """Return what became of the first answers that were right, or wrong, after k rounds."""
    some = [row for row in rows if pick(row.turns[0]).right == right_first]
    changed = [pick(row.turns[rounds]).right != right_first for row in some]
    rate = mean([float(each) for each in changed], [row.group for row in some]) if some else None
    return Change(len(some), sum(changed), rate)


def _base(turn: AnsweredTurn) -> ModelAnswer:
    return turn.base


def _tuned(turn: AnsweredTurn) -> ModelAnswer:
    return turn.tuned
