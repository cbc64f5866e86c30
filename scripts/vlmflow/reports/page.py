"""Pages and model cards: a template of `templates/`, filled with accounts. A page loads nothing and runs nothing.

The templates take the accounts that stages wrote, and have all HTML and Markdown. The filters below format their
numbers. The templates of HTML escape every value; in those of Markdown, the filters `text` and `code` do for every text
that is not ours. A misspelt name in a template is an error (StrictUndefined).
"""

import json
import re
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

from vlmflow.core.errors import counted, printable
from vlmflow.core.progress import clock

TEMPLATES = Path(__file__).with_name("templates")
"""A rule that makes pages names this folder for its code digest (harness/staleness.py); `publish_merged`, which makes
the card, names `card` in it."""

PIPE = re.compile(r"\\*\|")
MARKUP = re.compile(r"[\\`*\[\]|~$]|(?<!\w)_|_(?!\w)")
"""What has a meaning in a line of Markdown, in code and in text. An underscore within a word has none."""

HTML = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;"})


def _in_one_line(text: str) -> str:
    return printable(" ".join(text.split()))


def _as_text(text: str) -> str:
    return MARKUP.sub(r"\\\g<0>", _in_one_line(text)).translate(HTML)


def _as_code(text: str) -> str:
    # In code of a table, only a pipe can be escaped. With one more backslash before it, it would end the cell.
    return f"`{PIPE.sub(lambda _: chr(92) + '|', _in_one_line(text)).replace('`', chr(39))}`"


def gb_or_mb(size: int) -> str:
    """Format bytes for people: in GB, or in MB below a tenth of one."""
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"


def gigabytes(size: float) -> str:
    """Format bytes for people, in GB."""
    return f"{size / 1e9:,.1f} GB"


def short(number: float) -> str:
    """Format a number in few characters: 950, 2k, 1.5M."""
    for unit, name in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= unit:
            return f"{number / unit:.3g}{name}"
    return f"{number:.3g}"


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
    "counted": counted,
    "share": "{:.1%}".format,
    "percent": "{:.0%}".format,
    "gb": gb_or_mb,
    "gigabytes": gigabytes,
    "short": short,
    "clock": clock,
    "css": lambda share: f"{100 * share:.2f}%",
    "json": json.dumps,
    "text": _as_text,
    "code": _as_code,
    "printable": printable,
}
"""n: a count with thousands separators. counted: the same with its unit. share, percent: a share of 1 for people, with
one digit and without. gb, gigabytes: bytes. short: a number in few characters. clock: seconds as h:mm:ss. css: a share
as a length in a style. json: a value as JSON. text: a text from outside as Markdown within a line or a cell, where it
shows itself and does nothing. code: the same as code, with ' for `. printable: a text without control characters."""


def render(template: str, **facts: Any) -> str:
    """Return a page. template: a file of `templates/`. facts: accounts, and functions of them, by their names in it."""
    return ENVIRONMENT.get_template(template).render(facts)
