"""The rows of a damaged JSON array: every sound row, and the text between two sound rows.

No parser can continue after a broken row, so the beginning of the next row must be guessed. A row begins after a comma,
with an object whose first key is one with which rows begin (`,{"image":`). These keys are first learned from everything
sound in the file, so rows may begin in several ways. An object in a list inside a row (a turn) looks like a row, too;
its first key, which also occurs inside sound rows, tells it apart.
"""

import re
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from mmap import mmap
from pathlib import Path

import msgspec

from vlmflow.core.errors import VlmflowError
from vlmflow.core.progress import Progress

WHITE = b" \t\r\n"
LONGEST = 1 << 23
"""The most bytes that are read of a value, unless the next guessed row begins later: a bracket may never be closed.

msgspec gives up at about 1,000 open brackets, so no byte is read more often than that, however hostile the file is.
"""

# Possessive (*+): a hostile string of 100 MB must not be retried from every place in it.
STRING_OR_MARK = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|["\[\]{},]', re.DOTALL)
FIRST_KEY = re.compile(rb'\{[ \t\r\n]*("(?:[^"\\]|\\.){0,200}+")')
NEXT_OBJECT = re.compile(rb",[ \t\r\n]*(?=" + FIRST_KEY.pattern + rb")")
TRAILING = re.compile(r"trailing characters \(byte (\d+)\)")
"""msgspec's message if more follows a sound value: the place, from 1, of the next byte that is not white space."""


class DamagedArray:
    """The array from the bracket at byte `start` to the one at `end`, or to the end of a file that is cut."""

    def __init__(self, content: mmap, path: Path, start: int, end: int) -> None:
        self._content = content
        self._path = path
        self._first = skip_white(content, start + 1)
        self._end = end

    def spans(self) -> Iterator[tuple[int, int]]:
        """Yield each row's first byte and the byte after its last, without the white space around it.

        A broken row costs only the text between two sound ones. No row follows a trailing comma before the bracket.

        Raises VlmflowError if the array ends before the file does.
        """
        with Progress(f"{self._path} is damaged: reading it row by row", 2 * self._end, "bytes") as progress:
            begins = self._begins_of_rows(self._keys_of_rows(progress))
            place = self._first
            while place < self._end:
                number = bisect_left(begins, place)
                cut = self._end_of_row(place, begins[number] if number < len(begins) else self._end)
                yield place, without_white(self._content, place, cut)
                progress.advance(self._end + cut - progress.count)
                if cut >= self._end:
                    return
                place = min(skip_white(self._content, cut + 1), self._end)

    def _keys_of_rows(self, progress: Progress) -> set[bytes]:
        """Return the first keys of rows, learned from every run of sound values with commas between them.

        The values of a run are rows if it begins or ends with the array, if one of their first keys is nowhere inside a
        sound value, or if the run is longer than any sound value, and so more than a list inside one broken row.
        """
        of_rows: set[bytes] = set()
        inside: set[bytes] = set()
        doubtful: list[tuple[int, set[bytes]]] = []
        longest = 0
        place, begin, run, is_first = self._first, self._first, set[bytes](), True
        while place < self._end:
            progress.advance(place - progress.count)
            stop = end_of_value(self._content, place, min(self._end, place + LONGEST))
            if stop is not None:
                longest = max(longest, stop - place)
                if key := FIRST_KEY.match(self._content, place, stop):
                    run.add(key[1])
                inside.update(found[1] for found in NEXT_OBJECT.finditer(self._content, place, stop))
                if self._content[stop : stop + 1] == b",":
                    place = skip_white(self._content, stop + 1)
                    continue
                if stop == self._end or self._content[stop] in b"]}":
                    place = stop
            if is_first or (place == self._end < len(self._content)):
                of_rows |= run
            elif not run <= of_rows:
                doubtful.append((place - begin, run))
            found = NEXT_OBJECT.search(self._content, place, self._end)
            place = begin = found.end() if found else self._end
            run, is_first = set(), False
        return of_rows.union(*(run for size, run in doubtful if size > longest or not run <= inside))

    def _begins_of_rows(self, keys: set[bytes]) -> "array[int]":
        """Return the places of the commas after which a row begins with one of these keys."""
        objects = NEXT_OBJECT.finditer(self._content, self._first, self._end)
        return array("q", (found.start() for found in objects if found[1] in keys))

    def _end_of_row(self, place: int, cut: int) -> int:
        """Return the place of the comma or bracket after the row at `place`.

        cut: the comma before the next guessed row. A broken row ends there at the latest. A sound row may end later, if
        an object inside it begins as rows do.
        """
        for limit in (cut, min(self._end, place + LONGEST)):
            stop = end_of_value(self._content, place, limit)
            if stop is not None:
                if stop == self._end or self._content[stop : stop + 1] == b",":
                    return stop
                self._refuse_more_after(stop)
        return self._end_by_brackets(place, cut)

    def _end_by_brackets(self, place: int, cut: int) -> int:
        """Return the place of the first comma outside all brackets of a broken row; `cut` if there is none."""
        depth = 0
        for found in STRING_OR_MARK.finditer(self._content, place, min(cut, place + LONGEST)):
            mark = found[0]
            if mark in b"[{":
                depth += 1
            elif mark in b"]}":
                depth -= 1
            elif mark == b"," and depth == 0:
                return found.start()
            if depth < 0 or mark == b'"':  # a string that never ends
                break
        return cut

    def _refuse_more_after(self, bracket: int) -> None:
        """Refuse text after the array: this bracket closes it after a sound row, and no comma or bracket follows."""
        after = skip_white(self._content, bracket + 1)
        if self._content[bracket] == ord("]") and self._content[after] not in b",]}":
            raise VlmflowError(
                f"{self._path}: the array ends at byte {bracket + 1} of {len(self._content)}, but more text follows",
                "a file must hold one array; fix it or fetch it again",
            )


def end_of_value(content: mmap, place: int, limit: int) -> int | None:
    """Return the first byte after the sound value at `place` and white space; None if no value ends by `limit`."""
    with memoryview(content) as view, view[place:limit] as value:
        try:
            msgspec.json.decode(value, type=msgspec.Raw)
        except msgspec.DecodeError as error:
            trailing = TRAILING.search(str(error))
            return place + int(trailing[1]) - 1 if trailing else None
        except RecursionError:
            return None
    return limit


def without_white(content: mmap, start: int, end: int) -> int:
    """Return the first place from which on there is only white space before `end`, but not one before `start`."""
    while end > start and content[end - 1] in WHITE:
        end -= 1
    return end


def skip_white(content: mmap, start: int) -> int:
    """Return the first place from `start` on that is not white space, or the end of the file."""
    while start < len(content) and content[start] in WHITE:
        start += 1
    return start
