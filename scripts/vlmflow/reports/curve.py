"""A figure over the steps of a training, thinned for a chart: a spike of one step among thousands stays visible."""

import math
from array import array
from bisect import bisect_right
from dataclasses import dataclass

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
