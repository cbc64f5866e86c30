"""The rows of a file of objects one behind the other, each over several lines, as `jq` and `json.dump` write them."""

import mmap
import re
from collections.abc import Iterator
from pathlib import Path

from vlmflow.core.progress import Progress
from vlmflow.raw.damaged_array import LONGEST, end_of_value, without_white

BETWEEN = re.compile(rb"[ \t\r\n]*+,?[ \t\r\n]*+")
NEXT_ROW = re.compile(rb"\n\}?(?=\{)")
"""What is before a row behind a broken one: rows begin at the margin, and what is inside them is indented."""


def is_long(content: mmap.mmap, start: int, line: int) -> bool:
    """Return whether the object at `start` goes on behind its first line, as no row of JSON lines does.

    line: the end of that line. An object that is broken goes on if the line has only its brace.
    """
    if line - start < LONGEST and content[start:line].rstrip() == b"{":
        return True
    stop = end_of_value(content, start, min(len(content), start + LONGEST))
    return stop is not None and without_white(content, start, stop) > line


def long_objects(content: mmap.mmap, path: Path, start: int) -> Iterator[tuple[int, int]]:
    """Yield each row's first byte and the byte after its last.

    A broken row costs the text up to the next line that begins with a brace.
    """
    with Progress(f"finding the rows of {path}", len(content), "bytes") as progress:
        place = start
        while place < len(content):
            stop = end_of_value(content, place, min(len(content), place + LONGEST))
            if stop is None:
                found = NEXT_ROW.search(content, place)
                cut = found.end() if found else len(content)
                stop = end_of_value(content, place, cut) if cut > place + LONGEST else None
                stop = cut if stop is None else stop
            yield place, without_white(content, place, stop)
            place = BETWEEN.match(content, stop).end()  # type: ignore[union-attr]  # it also matches the empty string
            progress.advance(place - progress.count)
