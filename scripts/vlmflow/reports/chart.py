"""A chart of columns with its figures, as the pages' template draws it."""

from collections.abc import Mapping, Sequence
from typing import Any

from vlmflow.reports.histogram import Bin, Histogram


def chart(title: str, unit: str, series: Mapping[str, Histogram], bins: Sequence[Bin]) -> dict[str, Any]:
    """Give what the macro `chart` draws.

    series: the numbers, by data file (train, val, test: they have colours). bins: of these series.
    """
    names = [name for name, histogram in series.items() if histogram.count]
    shown = [series[name] for name in names]
    facts = [
        ("count", [f"{histogram.count:,}" for histogram in shown]),
        ("mean", [f"{histogram.total / histogram.count:,.1f}" for histogram in shown]),
        ("median", [f"{histogram.quantile(0.5):,}" for histogram in shown]),
        ("99 % are at most about", [f"{histogram.quantile(0.99):,}" for histogram in shown]),
        ("largest", [f"{histogram.largest:,}" for histogram in shown]),
    ]
    top = max((bin.shares[name] for bin in bins for name in names), default=1.0)
    return {"title": title, "unit": unit, "names": names, "bins": bins, "top": top, "facts": facts}
