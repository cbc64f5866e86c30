"""Splits a stage's work over pods: each takes every N-th item; their lines are joined in the original order.

Neighbouring rows are alike (small photographs here, large scans there), so every N-th item gives each pod about the
same amount of work; a contiguous range would not.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import islice, zip_longest
from pathlib import Path
from typing import TypeVar

from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import count_lines
from vlmflow.core.progress import Progress

Item = TypeVar("Item")

Part = tuple[int, int]
"""The number of a part, and how many parts there are: (1, 4) to (4, 4)."""

UNDIVIDED: Part = (1, 1)


def items_of(part: Part, items: Iterable[Item]) -> Iterator[Item]:
    """Yield the items of a part: every N-th, from the part's number on."""
    number, parts = part
    return islice(items, number - 1, None, parts)


def joined_lines(files: Sequence[Path]) -> Iterator[bytes]:
    """Yield the lines of all parts' files in the original order; each file has a line per picture of its part.

    Raises VlmflowError if the files are not the parts of one result.
    """
    total = sum(map(count_lines, files))
    with ExitStack() as opened:
        progress = opened.enter_context(Progress(f"joining {files[0]} to {files[-1].name}", total, "pictures"))
        parts = [opened.enter_context(file.open("rb")) for file in files]
        ended = False
        for number, lines in enumerate(zip_longest(*parts), start=1):
            found = [line for line in lines if line is not None]
            if ended or found != list(lines[: len(found)]) or not all(line.endswith(b"\n") for line in found):
                raise VlmflowError(
                    f"{files[0]} to {files[-1].name}, line {number}: these parts do not belong together: "
                    "one is incomplete, or from another run",
                    "remove them and run the same command again",
                )
            ended = len(found) < len(lines)
            yield from found
            progress.advance(len(found))
