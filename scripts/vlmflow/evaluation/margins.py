"""What is measured: whether a model prefers a row's right answer to its wrong one, and what that rests on.

The margin of a row is log p(right) - log p(wrong), each per token, after the same prompt. Form, length and whatever
makes every text likelier are in both answers and cancel. A share of rows has no scale: a model that gets better in
everything does not lose by it, as differences of losses do, which have a floor.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np

from vlmflow.evaluation.accounts import (
    OTHER,
    OTHER_PICTURE,
    OWN,
    QUESTION,
    Compared,
    EvaluatedRow,
    Margin,
    MarginFigures,
    MarginReport,
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


def margin_report(rows: Sequence[EvaluatedRow]) -> MarginReport:
    """Return the figures of rows, at least one."""
    without_gold = [row for row in rows if not row.gold_in_feedback]
    by_source: dict[str, list[EvaluatedRow]] = defaultdict(list)
    for row in rows:
        by_source[row.source].append(row)
    return MarginReport(
        all=margin_figures(rows),
        without_gold=margin_figures(without_gold) if 0 < len(without_gold) < len(rows) else None,
        sources={source: margin_figures(some) for source, some in sorted(by_source.items())},
    )


def margin_figures(rows: Sequence[EvaluatedRow]) -> MarginFigures:
    """Return the figures of some rows, at least one."""
    contexts = {name: None for row in rows for name in row.base}
    whole = OWN if OWN in contexts else QUESTION
    return MarginFigures(
        rows=len(rows),
        groups=len({row.group for row in rows}),
        right_first=_above(rows, QUESTION, None),
        right_with_feedback=_above(rows, OWN, None),
        uses_feedback=_above(rows, OWN, OTHER),
        sees=_above(rows, whole, OTHER_PICTURE),
        losses={name: _losses(rows, name) for name in contexts},
    )


def preferred(one: Values, other: Values | float) -> Values:
    """Return 1 where one is above the other, 0 where it is below, and one half where they are equal: a tie."""
    found: Values = (np.sign(one - other) + 1) / 2
    return found


def compare_shares(base: Values, tuned: Values, groups: Sequence[str]) -> list[Compared]:
    """Return the shares of both models, one comparison per column.

    base, tuned: what `preferred` gives, (rows, columns). groups: of each row.
    """
    return _compared(base, tuned, groups, share_interval, difference_interval)


def compare_losses(base: Values, tuned: Values, groups: Sequence[str]) -> list[Compared]:
    """Return the mean losses of both models, likewise. base, tuned: (rows, columns), in nats per token."""
    return _compared(base, tuned, groups, mean_interval, mean_interval)


def _compared(
    base: Values,
    tuned: Values,
    groups: Sequence[str],
    of_model: Callable[[Values, Groups], Bounds],
    of_difference: Callable[[Values, Groups], Bounds],
) -> list[Compared]:
    of_row = Groups(groups)
    difference = tuned - base
    three = zip(
        intervals_of(of_model(base, of_row)),
        intervals_of(of_model(tuned, of_row)),
        intervals_of(of_difference(difference, of_row)),
        strict=True,
    )
    different = np.count_nonzero(difference, axis=0).tolist()
    return [Compared(len(base), of_row.count, number, *each) for number, each in zip(different, three, strict=True)]


def _above(rows: Sequence[EvaluatedRow], context: str, other: str | None) -> Compared | None:
    """Compare how often a context's margin is above another's, or above 0; None if no row has what it takes."""
    some = [row for row in rows if context in row.base and _has(row.base, context, other)]
    if not some:
        return None

    def shares(models: list[dict[str, Margin]]) -> Values:
        return preferred(_values(models, context), 0.0 if other is None else _values(models, other))

    base, tuned = (shares([row.base for row in some]), shares([row.tuned for row in some]))
    return compare_shares(base, tuned, [row.group for row in some])[0]


def _has(margins: dict[str, Margin], context: str, other: str | None) -> bool:
    return margins[context].wrong is not None if other is None else other in margins


def _values(models: list[dict[str, Margin]], context: str) -> Values:
    return np.array([[margins[context].value] for margins in models])


def _losses(rows: Sequence[EvaluatedRow], context: str) -> Compared:
    some = [row for row in rows if context in row.base]
    base, tuned = (
        np.array([[margins[context].right.per_token] for margins in models])
        for models in ([row.base for row in some], [row.tuned for row in some])
    )
    return compare_losses(base, tuned, [row.group for row in some])[0]
