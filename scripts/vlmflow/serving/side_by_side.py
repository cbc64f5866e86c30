"""Two answers beside each other on a terminal."""

from collections.abc import Iterable

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vlmflow.core.printable import printable
from vlmflow.serving.answer import Answer


def show(console: Console, names: Iterable[str], answers: Iterable[Answer]) -> None:
    """Print answers in columns of equal width, under their models' names."""
    table = Table(box=SIMPLE_HEAD, expand=True, padding=(0, 1))
    for name in names:
        table.add_column(Text(printable(name)), ratio=1, overflow="fold")
    table.add_row(*(Text(_said(answer)) for answer in answers))
    console.print(table)


def _said(answer: Answer) -> str:
    text = lines(answer.text) or "(nothing)"
    return f"{text} …" if answer.cut else text


def lines(text: str) -> str:
    """Return a text of several lines with � for what a terminal might obey."""
    return "\n".join(printable(line) for line in text.strip().splitlines())
