"""Reads a data set's files line by line, so that memory does not grow with the rows."""

from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import count_lines
from vlmflow.core.progress import Progress
from vlmflow.pictures.image_manifest import MAKE_AGAIN

Line = TypeVar("Line")


def lines_of(file: Path, form: type[Line]) -> Iterator[Line]:
    """Yield every line of a file, decoded as `form`, and show the progress.

    Raises VlmflowError if a line does not have this form.
    """
    decoder = msgspec.json.Decoder(form)
    with file.open("rb") as lines, Progress(f"reading {file}", count_lines(file), "rows") as progress:
        for number, line in enumerate(lines, start=1):
            try:
                yield decoder.decode(line)
            except ValueError as error:
                raise VlmflowError(f"{file}, line {number}: {error}", MAKE_AGAIN) from None
            progress.advance()
