"""Counts of a number over any many rows, in bounded memory, and the bins in which a page draws them.

numpy's histogram wants all numbers at once, or the edges of the bins beforehand; here numbers come one by one, and
their range is known at the end.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

MOST_COLUMNS = 16
"""Columns of a chart of whole numbers; what is above the last one is counted in it."""

STEPS = [0, 1, 2, 3, 5, 7, *(step * 10**power for power in range(12) for step in (10, 15, 20, 30, 50, 70))]
"""The edges of wide bins: about equally far apart on a logarithmic scale, and known to two digits."""


class Histogram:
    """How often which number occurs.

    Numbers from 100 on are counted by their first two digits, so that no more than about 90 counts per power of ten
    are held, however many rows there are. Count, sum, smallest and largest are exact.
    """

    def __init__(self, values: Iterable[int] = ()) -> None:
        self._counts: Counter[int] = Counter()
        self.count = self.total = self.largest = 0
        self.smallest: int | None = None
        for value in values:
            self.add(value)

    def add(self, value: int) -> None:
        """Count one number, 0 or more."""
        unit = 10 ** max(0, len(str(value)) - 2)
        self._counts[value // unit * unit] += 1
        self.count += 1
        self.total += value
        self.largest = max(self.largest, value)
        self.smallest = value if self.smallest is None else min(self.smallest, value)

    def items(self) -> Iterable[tuple[int, int]]:
        """Give the numbers that occur, smallest first, with how often."""
        return sorted(self._counts.items())

    def quantile(self, share: float) -> int:
        """Give the smallest number that `share` of all are not above, to two digits; 0 where there are none."""
        seen = 0
        for value, count in self.items():
            seen += count
            if seen >= share * self.count:
                return value
        return 0


@dataclass(frozen=True)
class Bin:
    """One group of columns. label: the numbers in it. counts, shares (0 to 1): by series."""

    label: str
    counts: dict[str, int]
    shares: dict[str, float]


def integer_bins(series: Mapping[str, Histogram], domain: Sequence[int] | None = None) -> list[Bin]:
    """Give a bin for every number of `domain`, or else for every number that occurs in a series."""
    if domain is None:
        domain = sorted({value for histogram in series.values() for value, _ in histogram.items()})
    shown = list(domain[:MOST_COLUMNS])
    labels = [f"{value:,}" for value in shown]
    if len(domain) > len(shown):
        labels[-1] = f"≥ {labels[-1]}"
    return _bins(series, shown, labels)


def wide_bins(series: Mapping[str, Histogram]) -> list[Bin]:
    """Give bins that grow with the numbers (STEPS), from the smallest number that occurs to the largest."""
    smallest = [histogram.smallest for histogram in series.values() if histogram.smallest is not None]
    if not smallest:
        return []
    first = max(0, bisect_right(STEPS, min(smallest)) - 1)
    last = bisect_right(STEPS, max(histogram.largest for histogram in series.values()))
    edges = STEPS[first : last + 1]
    return _bins(series, edges[:-1], [f"{short(low)}–{short(high)}" for low, high in pairwise(edges)])


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
    """Write a number in few characters: 950, 2k, 1.5M."""
    for unit, name in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= unit:
            return f"{number / unit:.3g}{name}"
    return f"{number:.3g}"
