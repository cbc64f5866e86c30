"""Reads a data set's files line by line, so that memory does not grow with the rows."""

from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from vlmflow.core.account import read_lines
from vlmflow.core.files import count_lines
from vlmflow.core.progress import Progress

Line = TypeVar("Line")


def lines_of(file: Path, form: type[Line]) -> Iterator[Line]:
    """Yield every line of a file, decoded as `form`, and show the progress.

    Raises VlmflowError if a line does not have this form.
    """
    with Progress(f"reading {file}", count_lines(file), "rows") as progress:
        for line in read_lines(file, form):
            yield line
            progress.advance()
