"""A figure over the steps of a training, thinned for a chart: a spike of one step among thousands stays visible.

Counts a number over many rows in bounded memory, and makes the column chart in which a page draws them.

numpy's histogram needs all numbers at once, or the edges of the bins in advance. Here numbers come one by one, and
their range is known only at the end.

The facts of a line chart over the steps of a training, for the pages' templates.
"""

import math
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

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
    """The values of one figure, by step, in at most MOST_BINS bins of equally many steps.

    A value costs the same small work whenever it comes: when there are too many bins, neighbours are joined in pairs.
    odd: the steps whose value is not a finite number; these are in no bin.
    """

    def __init__(self) -> None:
        self.odd: list[int] = []
        self._steps, self._values = array("q"), array("d")
        self._bins: dict[int, StepBin] = {}
        self._width = 1

    @property
    def newest(self) -> float:
        """The value of the last step; raises IndexError without values."""
        return self._values[-1]

    @property
    def bins(self) -> list[StepBin]:
        """The bins, the first steps first."""
        return list(self._bins.values())

    def add(self, step: int, value: float) -> None:
        """Add the value of a step that is later than all others."""
        if not math.isfinite(value):
            self.odd.append(step)
            return
        self._steps.append(step)
        self._values.append(value)
        self._put(step, value)
        while len(self._bins) > MOST_BINS:
            self._join_pairs()

    def cut(self, step: int) -> None:
        """Forget the steps after `step`, which a resumed training repeats."""
        keep = bisect_right(self._steps, step)
        del self._steps[keep:], self._values[keep:]
        self.odd = [one for one in self.odd if one <= step]
        last = step // self._width
        self._bins = {number: one for number, one in self._bins.items() if number < last}
        start = bisect_right(self._steps, last * self._width - 1)
        for number in range(start, keep):
            self._put(self._steps[number], self._values[number])

    def _put(self, step: int, value: float) -> None:
        number = step // self._width
        one = StepBin(step, step, (value, step), (value, step), value, 1)
        if number in self._bins:
            self._bins[number].join(one)
        else:
            self._bins[number] = one

    def _join_pairs(self) -> None:
        before, self._bins = self._bins, {}
        self._width *= 2
        for number, one in before.items():
            if number // 2 in self._bins:
                self._bins[number // 2].join(one)
            else:
                self._bins[number // 2] = one


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


SIDE = 1_000
"""Width and height of the drawing in its own units; the page stretches it to its place."""

MOST_DOTS = 60
"""A curve of at most this many values has a dot at each."""


@dataclass(frozen=True)
class Tick:
    """A label of an axis. place: its share of the axis, from the left or from the bottom."""

    label: str
    place: float


@dataclass(frozen=True)
class Line:
    """One curve. name: also its class in style.css. paths are SVG's.

    mean: the means of neighbouring steps. band: from their lowest values to their highest. dots: the single values of a
    short curve. odd: the steps whose value is not a finite number, at the upper edge.
    """

    name: str
    mean: str
    band: str
    dots: str
    odd: str


@dataclass(frozen=True)
class Figures:
    """The figures of a curve in the table below the chart, as texts. lowest, highest: value and step."""

    name: str
    newest: str
    lowest: str
    highest: str
    odd: int


@dataclass(frozen=True)
class LineChart:
    """The facts for the macro `line_chart`. thinned: the most steps that one point of a curve stands for."""

    title: str
    unit: str
    lines: list[Line]
    across: list[Tick]
    up: list[Tick]
    figures: list[Figures]
    thinned: int


def line_chart(
    title: str, unit: str, curves: Mapping[str, Curve], steps: int, form: Callable[[float], str] = short
) -> LineChart | None:
    """Return a chart of curves, by their names; None if none has a value.

    steps: the last step of the axis. form: how a value is written at the axis and in the table.
    """
    shown = {name: curve for name, curve in curves.items() if curve.bins or curve.odd}
    if not shown:
        return None
    bins = {name: curve.bins for name, curve in shown.items()}
    low, high = _range([one for each in bins.values() for one in each])
    scale = _Scale(max(1, steps), low, high)
    return LineChart(
        title,
        unit,
        [_line(name, bins[name], shown[name].odd, scale) for name in shown],
        [Tick(f"{value:,.0f}", value / scale.steps) for value in ticks(0, scale.steps) if value == int(value)],
        [Tick(form(value), (value - low) / (high - low)) for value in ticks(low, high)],
        [_figures(name, curve, form) for name, curve in shown.items()],
        max((one.count for each in bins.values() for one in each), default=1),
    )


@dataclass(frozen=True)
class _Scale:
    steps: int
    low: float
    high: float

    def point(self, step: float, value: float) -> str:
        across = SIDE * step / self.steps
        down = SIDE * (self.high - value) / (self.high - self.low)
        return f"{across:.1f} {down:.1f}"


def _range(bins: list[StepBin]) -> tuple[float, float]:
    """Return the ends of the upright axis; it begins at 0, unless the values are far above and close together."""
    if not bins:
        return 0.0, 1.0
    low, high = min(one.low[0] for one in bins), max(one.high[0] for one in bins)
    if 0 <= low < 0.8 * high:
        low = 0.0
    margin = 0.06 * (high - low) or abs(high) or 1.0
    return low - (margin if low else 0.0), high + margin


def ticks(low: float, high: float) -> list[float]:
    """Return three to six round values from `low` to `high`."""
    rough = (high - low) / 4
    power: float = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.75)
    return [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _line(name: str, bins: list[StepBin], odd: list[int], scale: _Scale) -> Line:
    mean = "L".join(scale.point(one.middle, one.mean) for one in bins)
    band = ""
    if any(one.low[0] < one.high[0] for one in bins):
        above = [scale.point(one.middle, one.high[0]) for one in bins]
        below = [scale.point(one.middle, one.low[0]) for one in reversed(bins)]
        band = f"M{'L'.join([*above, *below])}Z"
    dots = [scale.point(one.middle, one.mean) for one in bins] if len(bins) <= MOST_DOTS else []
    strange = [scale.point(step, scale.high) for step in odd[-MOST_DOTS:]]
    return Line(name, f"M{mean}" if bins else "", band, _dots(dots), _dots(strange))


def _dots(points: list[str]) -> str:
    return "".join(f"M{point}h0" for point in points)


def _figures(name: str, curve: Curve, form: Callable[[float], str]) -> Figures:
    if not curve.bins:
        return Figures(name, "–", "–", "–", len(curve.odd))
    lowest, highest = min(one.low for one in curve.bins), max(one.high for one in curve.bins)
    return Figures(name, form(curve.newest), _at(lowest, form), _at(highest, form), len(curve.odd))


def _at(point: Point, form: Callable[[float], str]) -> str:
    value, step = point
    return f"{form(value)} at step {step:,}"
