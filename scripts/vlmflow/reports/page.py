"""Pages for people: a template of `templates/`, filled with facts. A page loads nothing and runs nothing.

All HTML is in the templates; the other modules of this folder collect the facts of a page, as typed values. The
templates escape every value, and a misspelt name in a template is an error (StrictUndefined).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

TEMPLATES = Path(__file__).with_name("templates")
"""A rule that makes pages names this folder for its code digest (harness/code_digest.py)."""

ENVIRONMENT = Environment(
    loader=FileSystemLoader(TEMPLATES),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
ENVIRONMENT.filters |= {"n": "{:,}".format, "share": "{:.1%}".format, "css": lambda share: f"{100 * share:.2f}%"}
"""n: a count with thousands separators. share: a share of 1 for people. css: the same as a length in a style."""


@dataclass(frozen=True)
class Tile:
    """One figure at the top of a page. note: its unit or meaning."""

    label: str
    value: str
    note: str


def render(template: str, page: Any) -> str:
    """Return a page. template: a file of `templates/`. page: its facts, which the template calls `page`."""
    return ENVIRONMENT.get_template(template).render(page=page)
