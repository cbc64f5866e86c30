"""The facts of a line chart over the steps of a training, for the pages' templates."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from vlmflow.reports.curve import Curve, Point, StepBin
from vlmflow.reports.histogram import short

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
