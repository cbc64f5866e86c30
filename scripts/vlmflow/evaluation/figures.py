"""From the losses of rows to the figures of an evaluation."""

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean

from vlmflow.evaluation.accounts import PLACEBO, EvaluatedRow, Figures, Interval, use_of_feedback
from vlmflow.evaluation.bootstrap import interval

FEWEST_ROWS = 50
"""A source with fewer rows has no intervals: they would be noise."""


def figures_of(rows: Sequence[EvaluatedRow], seed: int, intervals: bool = True) -> Figures:
    """Return the figures of some rows, at least one. seed: of the intervals. intervals: whether to compute them."""
    groups = [row.group for row in rows]

    def mean(values: list[float]) -> Interval:
        return interval(values, groups, seed) if intervals else Interval(fmean(values), None, None)

    passes = list(rows[0].base)
    feedback = PLACEBO in passes
    base_uses = [use_of_feedback(row.base) for row in rows] if feedback else []
    tuned_uses = [use_of_feedback(row.tuned) for row in rows] if feedback else []
    base = {name: [row.base[name].per_token for row in rows] for name in passes}
    tuned = {name: [row.tuned[name].per_token for row in rows] for name in passes}
    return Figures(
        rows=len(rows),
        groups=len(set(groups)),
        base={name: fmean(values) for name, values in base.items()},
        tuned={name: fmean(values) for name, values in tuned.items()},
        difference={name: mean(_minus(tuned[name], base[name])) for name in passes},
        base_uses=mean(base_uses) if feedback else None,
        tuned_uses=mean(tuned_uses) if feedback else None,
        learned=mean(_minus(tuned_uses, base_uses)) if feedback else None,
    )


def figures_by_source(rows: Sequence[EvaluatedRow], seed: int) -> dict[str, Figures]:
    """Return the figures of every source, sorted by its name; intervals only where a source has enough rows."""
    by_source: dict[str, list[EvaluatedRow]] = defaultdict(list)
    for row in rows:
        by_source[row.source].append(row)
    return {
        source: figures_of(some, seed, intervals=len(some) >= FEWEST_ROWS) for source, some in sorted(by_source.items())
    }


def _minus(some: list[float], others: list[float]) -> list[float]:
    return [one - other for one, other in zip(some, others, strict=True)]
