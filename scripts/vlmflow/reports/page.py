"""Pages and model cards: a template of `templates/`, filled with facts. A page loads nothing and runs nothing.

All HTML and Markdown is in the templates; the other modules of this folder collect the facts, as typed values. The
templates of HTML escape every value, and a misspelt name in a template is an error (StrictUndefined).
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

TEMPLATES = Path(__file__).with_name("templates")
"""A rule that makes pages names this folder for its code digest (harness/code_digest.py); `publish_merged`, which makes
the card, names `card` in it."""


def _in_cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _as_code(text: str) -> str:
    return f"`{_in_cell(text).replace('`', chr(39))}`"


ENVIRONMENT = Environment(
    loader=FileSystemLoader(TEMPLATES),
    autoescape=select_autoescape(disabled_extensions=["md.jinja"], default=True),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
ENVIRONMENT.filters |= {
    "n": "{:,}".format,
    "share": "{:.1%}".format,
    "css": lambda share: f"{100 * share:.2f}%",
    "json": json.dumps,
    "cell": _in_cell,
    "code": _as_code,
}
"""n: a count with thousands separators. share: a share of 1 for people. css: the same as a length in a style. json: a
value as JSON. cell: a text from the data in a cell of a Markdown table. code: the same, without effective Markdown."""


@dataclass(frozen=True)
class Tile:
    """One figure at the top of a page. note: its unit or meaning."""

    label: str
    value: str
    note: str


def render(template: str, page: Any) -> str:
    """Return a page. template: a file of `templates/`. page: its facts, which the template calls `page`."""
    return ENVIRONMENT.get_template(template).render(page=page)
