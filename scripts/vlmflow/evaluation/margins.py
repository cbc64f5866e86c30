"""95 % intervals of means and shares whose rows come in groups: closed formulas, so nothing is drawn.

Rows of one picture are alike, so every variance is that of groups: of the sums of what their rows have above the mean
(the linearised variance of a ratio; Cochran, Sampling Techniques, 1977, section 6.4). Two rows of which one has the
other's feedback or picture as a control, or that have the same control, are alike, too: what they have above the mean,
multiplied, is added to the variance (dyadic dependence; Aronow, Samii and Assenova, Cluster-robust variance estimation
for dyadic data, 2015). Quantiles are Student's, with as many degrees of freedom as there are effective groups, less
one. Values may be one column (rows,) or many (rows, columns): then each column has an interval of its own.
`docs/evaluation.md` has how often these intervals hold the truth.

What is measured: whether a model prefers a row's right answer to its wrong one, and what that rests on.

The margin of a row is log p(right) - log p(wrong), each per token, after the same prompt. Form, length and whatever
makes every text likelier are in both answers and cancel. A share of rows has no scale: a model that gets better in
everything does not lose by it, as differences of losses do, which have a floor.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from vlmflow.evaluation.report import (
    FEWEST_EFFECTIVE,
    FEWEST_GROUPS,
    OWN,
    QUESTION,
    SHARES,
    Compared,
    EvaluatedRow,
    Interval,
    MarginFigures,
    MarginReport,
    OneAnswer,
    Share,
)
from vlmflow.evaluation.verdict import EQUAL, preferred, row_shares
from vlmflow.rows.mixture_files import sources_of

COVERED = 0.95

Values = NDArray[np.float64]


@dataclass(frozen=True)
class Bounds:
    """Means and the ends of their intervals, one per column; low, high: nan if the groups do not suffice."""

    mean: Values
    low: Values
    high: Values


def intervals_of(bounds: Bounds) -> list[Interval]:
    """Return the intervals of columns."""
    ends = zip(bounds.mean.tolist(), bounds.low.tolist(), bounds.high.tolist(), strict=True)
    return [Interval(mean, None, None) if np.isnan(low) else Interval(mean, low, high) for mean, low, high in ends]


class Groups:
    """The groups of rows, by the group's name of each row.

    links: the places of two rows that are alike without being of one group; each pair once. covered: how often an
    interval shall hold the truth. count: how many groups there are. effective: as many groups of the same size would
    say as much (Kish, Survey Sampling, 1965).
    """

    def __init__(
        self, of_row: Sequence[str], links: Collection[tuple[int, int]] = (), covered: float = COVERED
    ) -> None:
        self._covered = covered
        names, number = np.unique(np.asarray(of_row), return_inverse=True)
        self.count = len(names)
        self._order = np.argsort(number, kind="stable")
        self._starts = np.searchsorted(number[self._order], np.arange(self.count))
        self._sizes = np.bincount(number, minlength=self.count).astype(float)
        self.effective = float(self._sizes.sum() ** 2 / np.sum(self._sizes**2))
        across = [(row, other) for row, other in links if number[row] != number[other]]
        self._links = np.array(across, dtype=int).reshape(-1, 2)

    @property
    def suffice(self) -> bool:
        """Whether an interval may rest on them."""
        return self.count >= FEWEST_GROUPS and self.effective >= FEWEST_EFFECTIVE

    def influence(self, values: Values) -> Values:
        """Return what each group adds to the mean's error: (groups, columns), in the unit of the values, 0 in sum."""
        sums: Values = np.add.reduceat(values[self._order], self._starts, axis=0)
        added: Values = (sums - self._sizes[:, None] * values.mean(axis=0)) * (self.count / len(values))
        return added

    def variance(self, values: Values, influence: Values) -> Values:
        """Return the variance of the mean of each column, at least that of its groups alone (`influence`)."""
        above = values - values.mean(axis=0)
        shared = 2 * np.sum(above[self._links[:, 0]] * above[self._links[:, 1]], axis=0) / len(values) ** 2
        variance: Values = influence.var(axis=0, ddof=1) / self.count + np.maximum(shared, 0.0)
        return variance

    def quantile(self) -> float:
        """Return Student's quantile of a two-sided interval."""
        return float(stdtrit(self.effective - 1, (1 + self._covered) / 2))


def mean_interval(values: Values, groups: Groups) -> Bounds:
    """Return the interval of the mean of values of any size, such as differences between losses.

    It reaches from the lower of two intervals' ends to the higher: Student's, and Hall's, whose cubic transformation
    takes the skewness out (Hall, On the removal of skewness by transformation, 1992). Student's alone misses with
    skewed values and with effects in few rows, Hall's with heavy tails, where skewness is known badly.
    """
    if not groups.suffice:
        return _without_ends(values)
    columns = values.reshape(len(values), -1)
    influence = groups.influence(columns)
    count, quantile = groups.count, groups.quantile()
    deviation = influence.std(axis=0, ddof=1)
    known = np.where(deviation > 0, deviation, 1.0)
    # The adjusted Fisher-Pearson coefficient: without its factor samples are less skewed than what they come from.
    skewness = np.mean(influence**2 * influence, axis=0) / known**3 * np.sqrt(count * (count - 1)) / (count - 2)
    mean, error = columns.mean(axis=0), np.sqrt(groups.variance(columns, influence))
    low = mean - np.maximum(_hall(quantile, skewness / np.sqrt(count)), quantile) * error
    high = mean - np.minimum(_hall(-quantile, skewness / np.sqrt(count)), -quantile) * error
    return _bounds(values, mean, low, high)


def share_interval(shares: Values, groups: Groups) -> Bounds:
    """Return the interval of a share: of rows that are 1, and not 0 or (a tie) one half.

    Two rows of 0 and two of 1 are added to the effective number of rows (Agresti and Coull, Approximate is better than
    "exact" for interval estimation of binomial proportions, 1998), so that it fits near 0 and 1.
    """
    interval = _of_signs(2 * shares - 1, groups, added=4)
    return Bounds((interval.mean + 1) / 2, (interval.low + 1) / 2, (interval.high + 1) / 2)


def difference_interval(differences: Values, groups: Groups) -> Bounds:
    """Return the interval of the difference of two shares of the same rows.

    differences: one share minus the other, row by row: -1, 0 or 1, or halves where one is a tie. One row of -1 and one
    of 1 are added to the effective number of rows (Bonett and Price, Adjusted Wald confidence interval for a difference
    of binomial proportions based on paired data, 2012), so that it fits few rows that differ.
    """
    return _of_signs(differences, groups, added=2)


def _of_signs(values: Values, groups: Groups, added: int) -> Bounds:
    """Return the interval of a mean of values between -1 and 1. added: rows, half of them -1 and half 1.

    The effective number of rows is their number divided by the design effect (Kish, Survey Sampling, 1965): how much
    the variance of groups exceeds that of as many independent rows. It is at least 1; where all rows are equal it is
    unknown, and the effective groups count.
    """
    if not groups.suffice:
        return _without_ends(values)
    columns = values.reshape(len(values), -1)
    rows, mean, square = len(columns), columns.mean(axis=0), np.mean(columns**2, axis=0)
    independent = (square - mean**2) / rows
    equal = independent <= np.finfo(float).eps
    variance = groups.variance(columns, groups.influence(columns))
    effect = np.where(equal, rows / groups.effective, variance / np.where(equal, 1.0, independent))
    effective = rows / np.maximum(effect, 1.0)
    total = effective + added
    centre = effective * mean / total
    width = groups.quantile() * np.sqrt(((effective * square + added) / total - centre**2) / total)
    return _bounds(values, mean, np.maximum(centre - width, -1.0), np.minimum(centre + width, 1.0))


def _hall(quantile: float, skewness: Values) -> Values:
    """Return the quantile of the studentised mean of skewed values. skewness: divided by the root of their number.

    It inverts g(t) = t + s t²/3 + s² t³/27 + s/6, which is nearly symmetric.
    """
    third = skewness / 3
    flat = np.abs(third) < 1e-9
    safe = np.where(flat, 1.0, third)
    bent = (np.cbrt(1 + 3 * safe * (quantile - skewness / 6)) - 1) / safe
    return np.where(flat, quantile, bent)


def _without_ends(values: Values) -> Bounds:
    mean = values.mean(axis=0)
    return Bounds(mean, np.full_like(mean, np.nan), np.full_like(mean, np.nan))


def _bounds(values: Values, *columns: Values) -> Bounds:
    """Return what was found for columns in the form of the values."""
    return Bounds(*(each.reshape(values.shape[1:])[()] for each in columns))


def margin_report(rows: Sequence[EvaluatedRow]) -> MarginReport:
    """Return the figures of rows, at least one.

    The intervals of k sources cover 1 - 0.05 / k each (Bonferroni): so all of them hold the truth in 95 % of cases.
    """
    by_source: dict[str, list[EvaluatedRow]] = defaultdict(list)
    for row in rows:
        for source in sources_of(row.id, row.source):
            by_source[source].append(row)
    covered = 1 - (1 - COVERED) / len(by_source)
    with_gold, without_gold = _parted(rows, lambda row: row.gold_in_feedback)
    with_echo, without_echo = _parted(rows, lambda row: bool(row.echo))
    return MarginReport(
        all=margin_figures(rows),
        with_gold=with_gold,
        without_gold=without_gold,
        with_echo=with_echo,
        without_echo=without_echo,
        sources={source: margin_figures(some, covered) for source, some in sorted(by_source.items())},
    )


def _parted(
    rows: Sequence[EvaluatedRow], has: Callable[[EvaluatedRow], bool]
) -> tuple[MarginFigures | None, MarginFigures | None]:
    """Return the figures of the rows that have something, and of the others; both None if none has it."""
    parts = [row for row in rows if has(row)], [row for row in rows if not has(row)]
    having, others = (margin_figures(some) if some and parts[0] else None for some in parts)
    return having, others


def margin_figures(rows: Sequence[EvaluatedRow], covered: float = COVERED) -> MarginFigures:
    """Return the figures of some rows, at least one. covered: how often an interval shall hold the truth."""
    contexts = {name: None for row in rows for name in row.base}
    adds = [(row, row_shares(row.base), row_shares(row.tuned)) for row in rows]
    return MarginFigures(
        rows=len(rows),
        groups=len({row.group for row in rows}),
        losses={name: _losses(rows, name, covered) for name in contexts},
        **{name: _share(adds, name, covered) for name in SHARES},
        own=_own(rows, covered),
        one_answer=_one_answer(rows, covered),
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
    bounds = of_model(base, groups), of_model(tuned, groups), of_difference(difference, groups)
    three = zip(*map(intervals_of, bounds), strict=True)
    different = np.count_nonzero(np.abs(difference) > EQUAL, axis=0).tolist()
    return [Compared(len(base), groups.count, number, *each) for number, each in zip(different, three, strict=True)]


def _share(
    rows: Sequence[tuple[EvaluatedRow, Mapping[str, float], Mapping[str, float]]], name: str, covered: float
) -> Compared | None:
    """Compare a share. rows: with what each adds to the shares of the base and of the tuned model."""
    some = [each for each in rows if name in each[1]]
    if not some:
        return None
    row, base, tuned = zip(*some, strict=True)
    donors = {
        "uses_feedback": [each.donors for each in row],
        "sees": [[each.picture_donor] for each in row],
    }.get(name, [])
    groups = Groups([each.group for each in row], links([each.id for each in row], donors), covered)
    of_base, of_tuned = (np.array([[each[name]] for each in models]) for models in (base, tuned))
    return compare_shares(of_base, of_tuned, groups)[0]


def links(ids: Sequence[str], donors: Sequence[Collection[str | None]]) -> set[tuple[int, int]]:
    """Return the places of rows of which one is the control of the other, or which share one: each pair once.

    ids: of rows. donors: those of the same rows, or none.
    """
    numbers = {name: number for number, name in enumerate(ids)}
    takers: dict[str, list[int]] = defaultdict(list)
    for number, some in enumerate(donors):
        for donor in some:
            if donor is not None:
                takers[donor].append(number)
    alike = ([*some, *([numbers[donor]] if donor in numbers else [])] for donor, some in takers.items())
    return {(min(pair), max(pair)) for some in alike for pair in combinations(some, 2)}


def _own(rows: Sequence[EvaluatedRow], covered: float) -> Share | None:
    """Return the share of rows whose margin with the own feedback is larger than the base's; None without feedback."""
    some = [row for row in rows if OWN in row.base]
    base, tuned = (np.array([getattr(row, model)[OWN].value for row in some]) for model in ("base", "tuned"))
    return share_above(base, tuned, Groups([row.group for row in some], covered=covered)) if some else None


def _one_answer(rows: Sequence[EvaluatedRow], covered: float) -> OneAnswer | None:
    """Return the figures of rows without a wrong answer; None if there are none."""
    context = OWN if any(OWN in row.base for row in rows) else QUESTION
    some = [row for row in rows if row.base[context].wrong is None]
    if not some:
        return None
    base, tuned = (
        np.array([getattr(row, model)[context].right.per_token for row in some]) for model in ("base", "tuned")
    )
    groups = Groups([row.group for row in some], covered=covered)
    loss = compare_losses(base[:, None], tuned[:, None], groups)[0]
    return OneAnswer(share_above(-base, -tuned, groups), loss)


def share_above(base: Values, tuned: Values, groups: Groups) -> Share:
    """Return in which share of rows the tuned model has more. base, tuned: (rows,), in nats per token."""
    interval = intervals_of(share_interval(preferred(tuned, base, EQUAL)[:, None], groups))[0]
    return Share(len(base), groups.count, int(np.count_nonzero(np.abs(tuned - base) > EQUAL)), interval)


def _losses(rows: Sequence[EvaluatedRow], context: str, covered: float) -> Compared:
    some = [row for row in rows if context in row.base]
    base, tuned = (
        np.array([[margins[context].right.per_token] for margins in models])
        for models in ([row.base for row in some], [row.tuned for row in some])
    )
    return compare_losses(base, tuned, Groups([row.group for row in some], covered=covered))[0]
