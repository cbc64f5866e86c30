"""What is measured: whether a model prefers a row's right answer to its wrong one, and what that rests on.

The margin of a row is log p(right) - log p(wrong), each per token, after the same prompt. Form, length and whatever
makes every text likelier are in both answers and cancel. A share of rows has no scale: a model that gets better in
everything does not lose by it, as differences of losses do, which have a floor.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from vlmflow.evaluation.accounts import SHARES, Compared, EvaluatedRow, MarginFigures, MarginReport
from vlmflow.evaluation.intervals import (
    Bounds,
    Groups,
    Values,
    difference_interval,
    intervals_of,
    mean_interval,
    share_interval,
)
from vlmflow.evaluation.row_shares import row_shares
from vlmflow.rows.mixture_names import sources_of

EQUAL = 1e-4
"""Losses, in nats per token, that differ by no more are equal: float32 adds up to as much in another order."""


def margin_report(rows: Sequence[EvaluatedRow]) -> MarginReport:
    """Return the figures of rows, at least one."""
    without_gold = [row for row in rows if not row.gold_in_feedback]
    by_source: dict[str, list[EvaluatedRow]] = defaultdict(list)
    for row in rows:
        for source in sources_of(row.id, row.source):
            by_source[source].append(row)
    return MarginReport(
        all=margin_figures(rows),
        without_gold=margin_figures(without_gold) if 0 < len(without_gold) < len(rows) else None,
        sources={source: margin_figures(some) for source, some in sorted(by_source.items())},
    )


def margin_figures(rows: Sequence[EvaluatedRow]) -> MarginFigures:
    """Return the figures of some rows, at least one."""
    contexts = {name: None for row in rows for name in row.base}
    adds = [(row, row_shares(row.base), row_shares(row.tuned)) for row in rows]
    return MarginFigures(
        rows=len(rows),
        groups=len({row.group for row in rows}),
        losses={name: _losses(rows, name) for name in contexts},
        **{name: _share(adds, name) for name in SHARES},
    )


def compare_shares(base: Values, tuned: Values, groups: Groups) -> list[Compared]:
    """Return the shares of both models, one comparison per column.

    base, tuned: what `row_shares.preferred` gives, (rows, columns). groups: of the rows.
    """
    return _compared(base, tuned, groups, share_interval, difference_interval)


def compare_losses(base: Values, tuned: Values, groups: Groups) -> list[Compared]:
    """Return the mean losses of both models, likewise. base, tuned: (rows, columns), in nats per token."""
    return _compared(base, tuned, groups, mean_interval, mean_interval)


def _compared(
    base: Values,
    tuned: Values,
    groups: Groups,
    of_model: Callable[[Values, Groups], Bounds],
    of_difference: Callable[[Values, Groups], Bounds],
) -> list[Compared]:
    difference = tuned - base
    three = zip(
        intervals_of(of_model(base, groups)),
        intervals_of(of_model(tuned, groups)),
        intervals_of(of_difference(difference, groups)),
        strict=True,
    )
    different = np.count_nonzero(np.abs(difference) > EQUAL, axis=0).tolist()
    return [Compared(len(base), groups.count, number, *each) for number, each in zip(different, three, strict=True)]


def _share(rows: Sequence[tuple[EvaluatedRow, Mapping[str, float], Mapping[str, float]]], name: str) -> Compared | None:
    """Compare a share. rows: with what each adds to the shares of the base and of the tuned model."""
    some = [each for each in rows if name in each[1]]
    if not some:
        return None
    row, base, tuned = zip(*some, strict=True)
    donors = {"uses_feedback": [each.donor for each in row], "sees": [each.picture_donor for each in row]}.get(name, [])
    groups = Groups([each.group for each in row], links([each.id for each in row], donors))
    of_base, of_tuned = (np.array([[each[name]] for each in models]) for models in (base, tuned))
    return compare_shares(of_base, of_tuned, groups)[0]


def links(ids: Sequence[str], donors: Sequence[str | None]) -> set[tuple[int, int]]:
    """Return the places of rows of which one is the control of the other: each pair once.

    ids: of rows. donors: those of the same rows, or none.
    """
    place = {name: number for number, name in enumerate(ids)}
    pairs = [(number, place[donor]) for number, donor in enumerate(donors) if donor is not None and donor in place]
    return {(min(pair), max(pair)) for pair in pairs}


def _losses(rows: Sequence[EvaluatedRow], context: str) -> Compared:
    some = [row for row in rows if context in row.base]
    base, tuned = (
        np.array([[margins[context].right.per_token] for margins in models])
        for models in ([row.base for row in some], [row.tuned for row in some])
    )
    return compare_losses(base, tuned, Groups([row.group for row in some]))[0]
