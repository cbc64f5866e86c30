"""What all pages share."""

from pathlib import Path

import pytest

from browser import Browser
from vlmflow.core.errors import counted
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
