"""Confidence intervals by the paired bootstrap over groups (Efron and Tibshirani, 1993, chapter 13: percentiles).

Rows of one picture are not independent, so whole groups are drawn. A value is a difference between two losses of the
same row, so the difficulty of rows cancels out.
"""

from collections.abc import Sequence

import numpy as np

from vlmflow.evaluation.accounts import Interval

DRAWS = 10_000
LOW, HIGH = 2.5, 97.5

FEWEST_GROUPS = 20
"""With fewer groups there is no interval: the percentiles of so few draws are too narrow."""

AT_ONCE = 500
"""Draws computed at a time, so that memory stays small: each takes eight bytes per group."""


def interval(values: Sequence[float], groups: Sequence[str], seed: int) -> Interval:
    """Return the mean of values and its 95 % interval.

    values: one per row. groups: the group of each row. seed: equal seeds and groups give equal draws, so that the
    intervals of several figures of the same rows are comparable.
    """
    names, of_row = np.unique(np.asarray(groups), return_inverse=True)
    count = len(names)
    mean = float(np.mean(values))
    if count < FEWEST_GROUPS:
        return Interval(mean, None, None)
    sums, sizes = (np.bincount(of_row, weights, minlength=count) for weights in (np.asarray(values), None))
    random = np.random.default_rng(seed)
    means = np.empty(DRAWS)
    for first in range(0, DRAWS, AT_ONCE):
        drawn = random.integers(count, size=(min(AT_ONCE, DRAWS - first), count))
        means[first : first + AT_ONCE] = sums[drawn].sum(axis=1) / sizes[drawn].sum(axis=1)
    low, high = np.percentile(means, [LOW, HIGH])
    return Interval(mean, float(low), float(high))
