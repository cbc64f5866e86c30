"""The rows of a raw file, one huge JSON array or JSON lines, without holding the file.

The file is mapped, not read: its pages are the kernel's, only the rows' places are kept here (16 bytes a
row). The quick way splits a sound array with msgspec at the speed of the disk. A file with one broken row
is refused by that as a whole, so then a splitter of our own goes from row to row, and the broken one is handed on
for whoever decodes it to reject, with nothing lost around it.
"""

import mmap
import re
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from operator import add
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

import msgspec

from vlmflow.errors import VlmflowError

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
WHITE = b" \t\r\n"

BETWEEN_ROWS = re.compile(rb"[ \t\r\n]*(?:,[ \t\r\n]*)?")
LINE = re.compile(rb"[^\r\n]+")
FIRST_KEY = re.compile(rb'\{[ \t\r\n]*("[^"\\]{1,200}")')
LONGEST_BY_BRACKETS = 1 << 23
"""How far a row that does not decode is followed by its brackets: an open string would run through the whole file."""
# Possessive (*+): a hostile string of 100 MB must not be tried again from every place in it.
STRING_OR_MARK = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|["\[\]{},]', re.DOTALL)

Places = tuple[array, array]


class JsonRows:
    """The rows of one raw file, in order, to be read by number.

    starts, ends: by row number, its first byte and the byte after its last.

    Raises VlmflowError where the file is missing, empty, no array and no JSON lines, or cut.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise VlmflowError(f"{path}: {error}", "fetch or write this file again") from None
        try:
            self.starts, self.ends = self._find_rows()
        except BaseException:
            self._map.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._map.close()

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, number: int) -> bytes:
        """Give the bytes of one row, without the white space around it."""
        return self._map[self.starts[number] : self.ends[number]]

    def __iter__(self) -> Iterator[bytes]:
        for start, end in zip(self.starts, self.ends, strict=True):
            yield self._map[start:end]

    def shards(self, size: int) -> Iterator[range]:
        """Cut the row numbers into consecutive ranges of about `size` bytes each, at least one row."""
        first = 0
        while first < len(self):
            last = max(bisect_right(self.ends, self.starts[first] + size), first + 1)
            yield range(first, last)
            first = last

    def _find_rows(self) -> Places:
        start = len(BYTE_ORDER_MARK) if self._map[:3] == BYTE_ORDER_MARK else 0
        start = _skip_white(self._map, start)
        match self._map[start : start + 1]:
            case b"[":
                closed = _closing_bracket(self._map)
                return self._split_cut_array(start) if closed is None else self._split_sound_array(start, closed)
            case b"{":
                return _places(found.span() for found in LINE.finditer(self._map, start))
        raise VlmflowError(
            f"{self.path}: begins with {self._map[start : start + 40]!r}, neither a JSON array nor JSON lines",
            "this is another file than it claims to be (an error page?); remove it and fetch it again",
        )

    def _split_sound_array(self, start: int, end: int) -> Places:
        view = memoryview(self._map)
        content = view[start:]
        try:
            rows = msgspec.json.decode(content, type=list[msgspec.Raw])
            lengths = array("q", map(len, map(memoryview, rows)))
            del rows
        except (msgspec.DecodeError, RecursionError):
            lengths = None
        finally:
            content.release()
            view.release()
        if lengths is None:
            return self._split_damaged_array(start, end)
        starts = array("q")
        gap = BETWEEN_ROWS.match
        place = _skip_white(self._map, start + 1)
        for length in lengths:
            starts.append(place)
            place = gap(self._map, place + length).end()
        return starts, array("q", map(add, starts, lengths))

    def _split_cut_array(self, start: int) -> NoReturn:
        starts, _ = self._split_damaged_array(start, len(self._map))
        begin = starts[-1] if starts else start + 1
        raise VlmflowError(
            f"{self.path}: row {max(0, len(starts) - 1)}, which begins at byte {begin}, never ends: "
            f"the file is cut at byte {len(self._map)}, without the bracket that closes its array",
            "fetch the file again; a local copy: compare its size with the original's",
        )

    def _split_damaged_array(self, start: int, end: int) -> Places:
        """Find the rows one by one, from the bracket at `start` to the one at `end`.

        A row ends where the next one begins as the first row of all did (`{"image":`). What does not decode up to
        there is followed by its own brackets: a sound row of another kind ends by them, and a broken one costs what
        stands between two sound ones, and no more.
        """
        begins = self._begins_of_rows(start, end)
        spans: list[tuple[int, int]] = []
        place = _skip_white(self._map, start + 1)
        while place < end or spans:
            number = bisect_right(begins, place - 1)
            cut = begins[number] if number < len(begins) else end
            if not self._decodes(place, cut):
                balanced = self._end_by_brackets(place, end)
                if balanced is not None and (balanced <= cut or self._decodes(place, balanced)):
                    cut = balanced
            spans.append(self._without_white(place, cut))
            if cut >= end:
                break
            place = min(_skip_white(self._map, cut + 1), end)
        return _places(spans)

    def _begins_of_rows(self, start: int, end: int) -> list[int]:
        """Give the places of the commas behind which a row begins with the first key of all."""
        first = FIRST_KEY.search(self._map, start, end)
        if first is None:
            return []
        pattern = rb",(?=[ \t\r\n]*\{[ \t\r\n]*" + re.escape(first[1]) + rb")"
        return [found.start() for found in re.compile(pattern).finditer(self._map, start, end)]

    def _decodes(self, start: int, end: int) -> bool:
        with memoryview(self._map) as view, view[start:end] as row:
            try:
                msgspec.json.decode(row, type=msgspec.Raw)
            except (msgspec.DecodeError, RecursionError):
                return False
        return True

    def _end_by_brackets(self, start: int, end: int) -> int | None:
        """Give the place of the comma, or `end`, up to which brackets and strings from `start` on are closed."""
        depth = 0
        limit = min(end, start + LONGEST_BY_BRACKETS)
        for found in STRING_OR_MARK.finditer(self._map, start, limit):
            place = found.start()
            mark = self._map[place]
            if mark in b"[{":
                depth += 1
            elif mark in b"]}":
                depth -= 1
                if depth < 0:
                    self._refuse_more_after(start, place)
                    return None
            elif mark == ord(",") and depth == 0:
                return place
            elif found.end() - place == 1 and mark == ord('"'):
                return None  # a string that never ends
        return end if depth == 0 and limit == end else None

    def _refuse_more_after(self, row: int, bracket: int) -> None:
        """Refuse a second array: the first was closed behind a sound row, and no comma follows."""
        after = _skip_white(self._map, bracket + 1)
        if self._map[bracket] == ord("]") and self._map[after : after + 1] != b"," and self._decodes(row, bracket):
            raise VlmflowError(
                f"{self.path}: the array ends at byte {bracket + 1} of {len(self._map)}, and more follows",
                "one file holds one array; mend or fetch it again",
            )

    def _without_white(self, start: int, end: int) -> tuple[int, int]:
        while end > start and self._map[end - 1] in WHITE:
            end -= 1
        return start, end


def _skip_white(content: mmap.mmap, start: int) -> int:
    while start < len(content) and content[start] in WHITE:
        start += 1
    return start


def _closing_bracket(content: mmap.mmap) -> int | None:
    """Give the place of the bracket that closes the file's array; None where the file ends with something else."""
    end = len(content)
    while end and content[end - 1] in WHITE:
        end -= 1
    return end - 1 if end > 1 and content[end - 1] == ord("]") else None


def _places(spans: Iterable[tuple[int, int]]) -> Places:
    starts, ends = array("q"), array("q")
    for start, end in spans:
        starts.append(start)
        ends.append(end)
    return starts, ends
