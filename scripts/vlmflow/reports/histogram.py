"""Counts a number over many rows in bounded memory, and makes the column chart in which a page draws them.

numpy's histogram needs all numbers at once, or the edges of the bins in advance. Here numbers come one by one, and
their range is known only at the end.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

MOST_COLUMNS = 16
"""Columns of a chart of whole numbers; the last one includes larger numbers."""

STEPS = [0, 1, 2, 3, 5, 7, *(step * 10**power for power in range(12) for step in (10, 15, 20, 30, 50, 70))]
"""The edges of wide bins: about equally spaced on a logarithmic scale, with two digits."""


class Histogram:
    """The frequencies of numbers.

    Numbers from 100 on are counted by their first two digits, so that memory needs at most about 90 counts per power of
    ten for any number of rows. Count, sum, smallest and largest are exact.
    """

    def __init__(self, values: Iterable[int] = ()) -> None:
        self._counts: Counter[int] = Counter()
        self.count = self.total = self.largest = 0
        self.smallest: int | None = None
        for value in values:
            self.add(value)

    def add(self, value: int) -> None:
        """Count one number, 0 or more."""
        unit = _unit(value)
        self._counts[value // unit * unit] += 1
        self.count += 1
        self.total += value
        self.largest = max(self.largest, value)
        self.smallest = value if self.smallest is None else min(self.smallest, value)

    def items(self) -> Iterable[tuple[int, int]]:
        """Return the numbers with their frequencies, the smallest first."""
        return sorted(self._counts.items())

    def median(self) -> int:
        """Return the median, to two digits; of two in the middle the upper one (as `token_counts`)."""
        return next((value for value, seen in self._seen() if seen > self.count // 2), 0)

    def at_most(self, share: float) -> int:
        """Return a number that at least this share of the numbers does not exceed, to two digits; 0 without numbers."""
        value = next((value for value, seen in self._seen() if seen >= share * self.count), 0)
        return min(self.largest, value + _unit(value) - 1)

    def _seen(self) -> Iterable[tuple[int, int]]:
        """Return the numbers, each with how many there are up to it."""
        return accumulate(self.items(), lambda before, after: (after[0], before[1] + after[1]))


def _unit(value: int) -> int:
    """Return the unit of a number's second digit."""
    return int(10 ** max(0, len(str(value)) - 2))


@dataclass(frozen=True)
class Bin:
    """One group of columns. label: the numbers in it. counts, shares (0 to 1): by series."""

    label: str
    counts: dict[str, int]
    shares: dict[str, float]


def integer_bins(series: Mapping[str, Histogram], domain: Sequence[int] | None = None) -> list[Bin]:
    """Return a bin for every number of `domain`, or else for every number that occurs in a series."""
    if domain is None:
        domain = sorted({value for histogram in series.values() for value, _ in histogram.items()})
    shown = list(domain[:MOST_COLUMNS])
    labels = [f"{value:,}" for value in shown]
    if len(domain) > len(shown):
        labels[-1] = f"≥ {labels[-1]}"
    return _bins(series, shown, labels)


def wide_bins(series: Mapping[str, Histogram]) -> list[Bin]:
    """Return bins that grow with the numbers (STEPS), from the smallest number to the largest."""
    smallest = [histogram.smallest for histogram in series.values() if histogram.smallest is not None]
    if not smallest:
        return []
    first = max(0, bisect_right(STEPS, min(smallest)) - 1)
    last = bisect_right(STEPS, max(histogram.largest for histogram in series.values()))
    edges = STEPS[first : last + 1]
    return _bins(series, edges[:-1], [f"{short(low)}–{short(high)}" for low, high in pairwise(edges)])


@dataclass(frozen=True)
class Chart:
    """The facts for the macro `chart`.

    names: the data files; each has one column in every bin. top: the highest share (0 to 1) of a column.
    figures: a label, and a value for each of `names`.
    """

    title: str
    unit: str
    names: list[str]
    bins: Sequence[Bin]
    top: float
    figures: list[tuple[str, list[str]]]


def chart(title: str, unit: str, series: Mapping[str, Histogram], bins: Sequence[Bin]) -> Chart:
    """Return a chart. series: the numbers by data file (train, val, test have colours). bins: those of the series."""
    names = [name for name, histogram in series.items() if histogram.count]
    shown = [series[name] for name in names]
    figures = [
        ("count", [f"{histogram.count:,}" for histogram in shown]),
        ("mean", [f"{histogram.total / histogram.count:,.1f}" for histogram in shown]),
        ("median", [f"{histogram.median():,}" for histogram in shown]),
        ("99 % are at most about", [f"{histogram.at_most(0.99):,}" for histogram in shown]),
        ("largest", [f"{histogram.largest:,}" for histogram in shown]),
    ]
    top = max((bin.shares[name] for bin in bins for name in names), default=1.0)
    return Chart(title, unit, names, bins, top, figures)


def _bins(series: Mapping[str, Histogram], starts: list[int], labels: list[str]) -> list[Bin]:
    counts = {name: [0] * len(starts) for name in series}
    for name, histogram in series.items():
        for value, count in histogram.items():
            counts[name][max(0, bisect_right(starts, value) - 1)] += count
    return [
        Bin(
            label,
            {name: counts[name][number] for name in series},
            {name: counts[name][number] / (series[name].count or 1) for name in series},
        )
        for number, label in enumerate(labels)
    ]


def short(number: float) -> str:
    """Format a number in few characters: 950, 2k, 1.5M."""
    for unit, name in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= unit:
            return f"{number / unit:.3g}{name}"
    return f"{number:.3g}"
