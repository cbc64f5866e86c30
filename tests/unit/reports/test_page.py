"""What all pages share, and curves over the steps of a training: thinned, without losing a spike."""

import math
import time
from pathlib import Path

import pytest

from browser import Browser
from vlmflow.core.errors import counted
from vlmflow.reports.charts import MOST_BINS, Curve, line_chart, ticks
from vlmflow.reports.page import ENVIRONMENT

TEMPLATE = """{% extends "base.html.jinja" %}{% import "macros.html.jinja" as ui %}{% block kind %}A page{% endblock %}
{% block body %}{% for some in figures %}{{ ui.tiles(some) }}{% endfor %}{% endblock %}"""

IN_LAST_ROW = """[...document.querySelectorAll('.tiles')].map(grid => {
  const tops = [...grid.children].map(tile => tile.getBoundingClientRect().top)
  return tops.filter(top => top == tops.at(-1)).length })"""


def test_no_tile_is_alone_in_the_last_row(tmp_path: Path) -> None:
    """From two to twelve of them, the fewest and the most that pages have, on a wide screen and on a small one."""
    figures = [[("figure", "1,234", "unit")] * count for count in range(2, 13)]
    html = ENVIRONMENT.from_string(TEMPLATE).render(title="t", subtitle="s", figures=figures)
    (tmp_path / "page.html").write_text(html)
    with Browser(tmp_path / "profile") as browser:
        for width in (1280, 800):
            browser.open(tmp_path / "page.html", width=width)
            assert all(last > 1 for last in browser.evaluate(IN_LAST_ROW)), width


@pytest.mark.parametrize(
    ("number", "unit", "said"),
    [(0, "row", "0 rows"), (1, "picture", "1 picture"), (1_234, "row", "1,234 rows"), (2, "process", "2 processes")],
)
def test_a_count_has_its_unit(number: int, unit: str, said: str) -> None:
    assert counted(number, unit) == said


MACROS = ENVIRONMENT.get_template("macros.html.jinja").module


def curve_of(values: list[float]) -> Curve:
    """Return the curve of one value for each step, from step 1."""
    curve = Curve()
    for step, value in enumerate(values, start=1):
        curve.add(step, value)
    return curve


def test_a_spike_among_ten_thousand_steps_stays_visible() -> None:
    values = [3.0] * 10_000
    values[6_789] = 40.0
    curve = curve_of(values)
    assert MOST_BINS / 2 <= len(curve.bins) <= MOST_BINS
    assert max(one.high for one in curve.bins) == (40.0, 6_790)
    assert sum(one.count for one in curve.bins) == 10_000
    assert sum(one.total for one in curve.bins) == pytest.approx(sum(values))
    chart = line_chart("Loss", "nats", {"train": curve}, 10_000)
    assert chart is not None
    assert curve.highest == (40.0, 6_790)
    assert " 56.6L" in chart.band(curve), "the top, below a margin"
    assert '<td class="n">40 at step 6,790</td>' in MACROS.line_chart(chart)


@pytest.mark.parametrize("steps", [0, 5, 299, 300, 301, 999])
def test_repeated_steps_count_once(steps: int) -> None:
    """A resumed training repeats the steps after its checkpoint."""
    before, after = [float(step % 7) for step in range(1_000)], [50.0 + step % 5 for step in range(1_000 - steps)]
    curve = curve_of([*before[:-1], math.nan])
    curve.cut(steps)
    for step, value in enumerate(after, start=steps + 1):
        curve.add(step, value)
    whole = curve_of(before[:steps] + after)
    assert curve.bins == whole.bins
    assert curve.odd == []
    assert curve.newest == whole.newest


def test_values_that_are_not_numbers_are_marked_at_the_upper_edge() -> None:
    curve, only_odd = curve_of([3.0, math.nan, 2.0, math.inf]), curve_of([math.nan])
    chart = line_chart("Loss", "nats", {"train": curve, "val": Curve()}, 4)
    assert chart is not None
    assert list(chart.curves) == ["train"]
    assert chart.odd(curve) == "M500.0 0.0h0M1000.0 0.0h0"
    assert "nan" not in chart.mean(curve) + chart.band(curve) + chart.dots(curve)
    assert "not a number</span> train, in 2 steps" in MACROS.line_chart(chart)
    nothing_else = line_chart("Loss", "nats", {"train": only_odd}, 4)
    assert nothing_else is not None
    assert nothing_else.mean(only_odd) == ""
    assert line_chart("Loss", "nats", {"train": Curve()}, 4) is None


def test_a_constant_curve_has_an_axis() -> None:
    for value in (0.0, 5e-5, 3.0, -2.0):
        chart = line_chart("x", "y", {"train": curve_of([value, value])}, 2)
        assert chart is not None
        assert len(chart.up) >= 2
        assert all(0 <= place <= 1 for _, place in [*chart.up, *chart.across])


@pytest.mark.parametrize(
    ("low", "high", "found"),
    [
        (0, 10, [0, 2, 4, 6, 8, 10]),
        (0, 1, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0, 8, [0, 2, 4, 6, 8]),
        (0, 30_000, [0, 10_000, 20_000, 30_000]),
        (2.3, 2.9, [2.4, 2.6, 2.8]),
        (0, 4.4e-5, [0, 1e-5, 2e-5, 3e-5, 4e-5]),
    ],
)
def test_ticks_are_few_and_round(low: float, high: float, found: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(found)


def test_a_value_costs_little_however_many_there_are() -> None:
    curve, begun = Curve(), time.process_time()
    for step in range(100_000):
        curve.add(step, step % 13)
    assert (time.process_time() - begun) / 100_000 < 50e-6
