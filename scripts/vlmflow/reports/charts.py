"""Charts of pages: columns for numbers of rows, and curves over the steps of a training.

Both take numbers one by one, and keep a bounded summary of them: numpy's histogram needs all numbers at once, or the
edges of the bins in advance, and here their range is known only at the end. The macros `chart` and `line_chart` draw.
"""

import math
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from vlmflow.reports.page import short

MOST_COLUMNS = 16
"""Columns of a chart of whole numbers; the last one includes larger numbers."""

EDGES = [0, 1, 2, 3, 5, 7, *(step * 10**power for power in range(12) for step in (10, 15, 20, 30, 50, 70))]
"""The edges of wide bins: about equally spaced on a logarithmic scale, with two digits."""


class Histogram:
    """The frequencies of numbers.

    Numbers from 100 on are counted by their first two digits, so that memory needs at most about 90 counts per power of
    ten for any number of rows. Count, sum, smallest and largest are exact.
    """

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self.count = self.total = self.largest = 0
        self.smallest: int | None = None

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

    @property
    def mean(self) -> float:
        """The mean; raises ZeroDivisionError without numbers."""
        return self.total / self.count

    @property
    def median(self) -> int:
        """The median, to two digits; of two in the middle the upper one (as `token_counts`)."""
        return next((value for value, seen in self._seen() if seen > self.count // 2), 0)

    @property
    def p99(self) -> int:
        """A number that at least 99 % of the numbers do not exceed, to two digits; 0 without numbers."""
        value = next((value for value, seen in self._seen() if seen >= 0.99 * self.count), 0)
        return min(self.largest, value + _unit(value) - 1)

    def _seen(self) -> Iterable[tuple[int, int]]:
        """Return the numbers, each with how many there are up to it."""
        return accumulate(self.items(), lambda before, after: (after[0], before[1] + after[1]))


def _unit(value: int) -> int:
    """Return the unit of a number's second digit."""
    return int(10 ** max(0, len(str(value)) - 2))


@dataclass(frozen=True)
class Chart:
    """A column chart. series: the numbers by data file (train, val, test have colours); each has at least one.

    bins: the label of each group of columns, and how many numbers of each series are in it.
    """

    title: str
    unit: str
    series: Mapping[str, Histogram]
    bins: Sequence[tuple[str, Mapping[str, int]]]

    @property
    def top(self) -> float:
        """The highest share of a series (0 to 1) that is in one bin."""
        shares = (counts[name] / numbers.count for _, counts in self.bins for name, numbers in self.series.items())
        return max(shares, default=1.0)


def integer_chart(
    title: str, unit: str, series: Mapping[str, Histogram], domain: Sequence[int] | None = None
) -> Chart | None:
    """Return a chart with a bin for every number of `domain`, or else for every number that occurs; None without any.

    series: by data file; empty ones are left out.
    """
    series = _filled(series)
    values = domain or sorted({value for each in series.values() for value, _ in each.items()})
    shown = values[:MOST_COLUMNS]
    labels = [f"{value:,}" for value in shown]
    if len(values) > len(shown):
        labels[-1] = f"≥ {labels[-1]}"
    return Chart(title, unit, series, _bins(series, shown, labels)) if series else None


def wide_chart(title: str, unit: str, series: Mapping[str, Histogram]) -> Chart | None:
    """Return a chart whose bins grow with the numbers (EDGES), from the smallest number to the largest; as above."""
    if not (series := _filled(series)):
        return None
    first = max(0, bisect_right(EDGES, min(each.smallest or 0 for each in series.values())) - 1)
    last = bisect_right(EDGES, max(numbers.largest for numbers in series.values()))
    edges = EDGES[first : last + 1]
    labels = [f"{short(low)}–{short(high)}" for low, high in pairwise(edges)]
    return Chart(title, unit, series, _bins(series, edges[:-1], labels))


def _filled(series: Mapping[str, Histogram]) -> dict[str, Histogram]:
    return {name: numbers for name, numbers in series.items() if numbers.count}


def _bins(
    series: Mapping[str, Histogram], starts: Sequence[int], labels: Sequence[str]
) -> list[tuple[str, dict[str, int]]]:
    bins = [(label, dict.fromkeys(series, 0)) for label in labels]
    for name, numbers in series.items():
        for value, count in numbers.items():
            bins[max(0, bisect_right(starts, value) - 1)][1][name] += count
    return bins


MOST_BINS = 300
"""Bins of a curve; a chart is about twice as many pixels wide."""

Point = tuple[float, int]
"""A value, and its step."""


@dataclass
class StepBin:
    """The values of neighbouring steps.

    first, last: steps. low, high: the lowest and the highest value. total, count: the sum and number of all values.
    """

    first: int
    last: int
    low: Point
    high: Point
    total: float
    count: int

    @property
    def middle(self) -> float:
        """Where the bin stands on the axis of steps."""
        return (self.first + self.last) / 2

    @property
    def mean(self) -> float:
        """The mean of the values."""
        return self.total / self.count

    def join(self, other: "StepBin") -> None:
        """Add the values of another bin of later steps."""
        self.last = other.last
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)
        self.total += other.total
        self.count += other.count


class Curve:
    """The values of one figure, by step, in at most MOST_BINS bins of equally many steps: a spike stays visible.

    A value costs the same small work whenever it comes: when there are too many bins, neighbours are joined in pairs.
    odd: the steps whose value is not a finite number; these are in no bin.
    """

    def __init__(self) -> None:
        self.odd: list[int] = []
        self._steps, self._values = array("q"), array("d")
        self._bins: dict[int, StepBin] = {}
        self._width = 1

    def add(self, step: int, value: float) -> None:
        """Add the value of a step that is later than all others."""
        if not math.isfinite(value):
            self.odd.append(step)
            return
        self._steps.append(step)
        self._values.append(value)
        self._put_single(step, value)
        while len(self._bins) > MOST_BINS:
            before, self._bins = self._bins, {}
            self._width *= 2
            for values in before.values():
                self._put(values.first, values)

    def cut(self, step: int) -> None:
        """Forget the steps after `step`, which a resumed training repeats."""
        keep = bisect_right(self._steps, step)
        del self._steps[keep:], self._values[keep:]
        self.odd = [number for number in self.odd if number <= step]
        last = step // self._width
        self._bins = {number: values for number, values in self._bins.items() if number < last}
        for index in range(bisect_right(self._steps, last * self._width - 1), keep):
            self._put_single(self._steps[index], self._values[index])

    def _put_single(self, step: int, value: float) -> None:
        self._put(step, StepBin(step, step, (value, step), (value, step), value, 1))

    def _put(self, step: int, values: StepBin) -> None:
        number = step // self._width
        if number in self._bins:
            self._bins[number].join(values)
        else:
            self._bins[number] = values

    @property
    def bins(self) -> list[StepBin]:
        """The bins, the first steps first."""
        return list(self._bins.values())

    @property
    def newest(self) -> float:
        """The value of the last step; raises IndexError without values."""
        return self._values[-1]

    @property
    def lowest(self) -> Point:
        """The lowest value; raises ValueError without values."""
        return min(values.low for values in self.bins)

    @property
    def highest(self) -> Point:
        """The highest value; raises ValueError without values."""
        return max(values.high for values in self.bins)


SIDE = 1_000
"""Width and height of a drawing in its own units; the page stretches it to its place."""

MOST_DOTS = 60
"""A curve of at most this many values has a dot at each."""


@dataclass(frozen=True)
class LineChart:
    """A chart of curves, each with at least one value or odd step. steps: the last one of the axis, at least 1.

    curves: by their names, which are also their classes in style.css. form: how a value is written.
    """

    title: str
    unit: str
    curves: Mapping[str, Curve]
    steps: int
    form: Callable[[float], str]

    @cached_property
    def ends(self) -> tuple[float, float]:
        """The ends of the upright axis; it begins at 0, unless the values are far above and close together."""
        filled = [curve for curve in self.curves.values() if curve.bins]
        if not filled:
            return 0.0, 1.0
        low, high = min(each.lowest for each in filled)[0], max(each.highest for each in filled)[0]
        if 0 <= low < 0.8 * high:
            low = 0.0
        margin = 0.06 * (high - low) or abs(high) or 1.0
        return low - (margin if low else 0.0), high + margin

    @property
    def up(self) -> list[tuple[float, float]]:
        """The labels of the upright axis: values, and their shares of the axis from the bottom."""
        low, high = self.ends
        return [(value, (value - low) / (high - low)) for value in ticks(low, high)]

    @property
    def across(self) -> list[tuple[float, float]]:
        """The labels of the axis of steps: whole steps, and their shares of the axis from the left."""
        return [(step, step / self.steps) for step in ticks(0, self.steps) if step == int(step)]

    @property
    def thinned(self) -> int:
        """The most steps that one point of a curve stands for."""
        return max((values.count for curve in self.curves.values() for values in curve.bins), default=1)

    def mean(self, curve: Curve) -> str:
        """Return the SVG path of the means of neighbouring steps; "" without values."""
        points = "L".join(self._point(values.middle, values.mean) for values in curve.bins)
        return points and f"M{points}"

    def band(self, curve: Curve) -> str:
        """Return the SVG path from their lowest to their highest values; "" if each bin has one value."""
        bins = curve.bins
        if all(values.low[0] == values.high[0] for values in bins):
            return ""
        above = [self._point(values.middle, values.high[0]) for values in bins]
        below = [self._point(values.middle, values.low[0]) for values in reversed(bins)]
        return f"M{'L'.join([*above, *below])}Z"

    def dots(self, curve: Curve) -> str:
        """Return the SVG path of the single values of a short curve; "" of a long one."""
        bins = curve.bins if len(curve.bins) <= MOST_DOTS else []
        return "".join(f"M{self._point(values.middle, values.mean)}h0" for values in bins)

    def odd(self, curve: Curve) -> str:
        """Return the SVG path of the last steps whose value is not a finite number, at the upper edge."""
        return "".join(f"M{self._point(step, self.ends[1])}h0" for step in curve.odd[-MOST_DOTS:])

    def _point(self, step: float, value: float) -> str:
        low, high = self.ends
        return f"{SIDE * step / self.steps:.1f} {SIDE * (high - value) / (high - low):.1f}"


def line_chart(
    title: str, unit: str, curves: Mapping[str, Curve], steps: int, form: Callable[[float], str] = short
) -> LineChart | None:
    """Return a chart of the curves that have a value, by their names; None if none has. steps: the last of the axis."""
    shown = {name: curve for name, curve in curves.items() if curve.bins or curve.odd}
    return LineChart(title, unit, shown, max(1, steps), form) if shown else None


def ticks(low: float, high: float) -> list[float]:
    """Return three to six round values from `low` to `high`."""
    rough = (high - low) / 4
    power: float = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.75)
    return [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]
