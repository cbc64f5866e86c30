"""The facts of a column chart with its figures, for the pages' templates."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vlmflow.reports.histogram import Bin, Histogram


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
