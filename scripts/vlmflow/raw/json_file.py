"""The rows of a file of objects one behind the other, each over several lines, as `jq` and `json.dump` write them.

The rows of a raw file of JSON, one huge array, lines or longer objects, without holding the file in memory.

The file is mapped, not read: its pages are the kernel's, and only the places of its rows are kept here (16 bytes a
row). msgspec splits a sound array at the speed of the disk. It refuses an array with a broken row as a whole; its rows
are then separated one by one (see damaged_array), and the decoder rejects only the broken one.

The bytes say what a file holds: an array, alone or as the last value of an object; lines, if the first is a sound row
with others behind it; or objects of several lines each. What is none of these is read by lines in a file named .jsonl.
"""

import mmap
import os
import re
import shlex
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from operator import add, sub
from pathlib import Path
from typing import IO, Any, NoReturn, Self

import msgspec

from vlmflow.core.errors import VlmflowError
from vlmflow.core.progress import Progress
from vlmflow.raw.damaged_file import ANOTHER_FILE, LONGEST, DamagedArray, end_of_value, skip_white, without_white

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
        at = start
        while at < len(content):
            stop = end_of_value(content, at, min(len(content), at + LONGEST))
            if stop is None:
                match = NEXT_ROW.search(content, at)
                cut = match.end() if match else len(content)
                stop = end_of_value(content, at, cut) if cut > at + LONGEST else None
                stop = cut if stop is None else stop
            yield at, without_white(content, at, stop)
            at = BETWEEN.match(content, stop).end()  # type: ignore[union-attr]  # it also matches the empty string
            progress.advance(at - progress.count)


BYTE_ORDER_MARK = b"\xef\xbb\xbf"
BLOCK_BYTES = 1 << 20
LINE = re.compile(rb"[^ \t\r\n][^\r\n]*+")
"""A line of JSON lines, from its first character that is not white space on; an empty or blank line is not a row."""

AROUND_ROWS = re.compile(
    rb'\{\s*+(?:"[^"\\]{0,100}"\s*+:\s*+(?:"[^"\\]{0,1000}"|[-+.\w]{1,100})\s*+,\s*+){0,20}'
    rb'"(data|rows|train|examples)"\s*+:\s*+(?=\[\s*+\{)'
)
"""The beginning of an object whose last key holds the rows; those before it have numbers or texts."""

Places = tuple["array[int]", "array[int]"]

LONGEST_ROW = 1 << 27
"""The most bytes of a row in memory: a picture with `max_bytes` as base64 is shorter. A longer row is rejected."""

VALUE_BYTES = 64
"""About what an object of Python has for each value of a row, beside its text."""


def too_long(size: int) -> str:
    """Return the fault of a row that is longer than LONGEST_ROW in memory."""
    return f"the row has about {size:,} bytes in memory, at most {LONGEST_ROW:,} are read"


class JsonRows:
    """The rows of one raw file, in order, to be read by number.

    starts, ends: by row number, its first byte and the byte after its last, for a table in its temporary file.
    faults: by row number, why the row could not be read from a table (see table_file).
    columns: a table's column names, with the types of their values; None for JSON, where each row has its own keys.
    unread_columns: the names of a table's columns that its rows here do not have.
    unread_texts: those of them that hold texts, with the values of the first rows (table_file.LOOKED_AT).

    Raises VlmflowError if the file is missing, empty, truncated, or neither an array nor objects.
    """

    columns: dict[str, str] | None = None

    def __init__(self, path: Path) -> None:
        self.path = path
        self.faults: dict[int, str] = {}
        self.unread_columns: list[str] = []
        self.unread_texts: dict[str, list[Any]] = {}
        try:
            with self._open() as file:
                if not os.fstat(file.fileno()).st_size:
                    raise VlmflowError(f"{path}: the file is empty", ANOTHER_FILE)
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise VlmflowError(f"{path}: {error}", "fetch or write the file again") from None
        try:
            self.starts, self.ends = self._find_rows()
            for number, length in enumerate(map(sub, self.ends, self.starts)):
                if length * (VALUE_BYTES + 1) > LONGEST_ROW:  # each value has a comma, and may have nothing else
                    values = 0 if length > LONGEST_ROW else self[number].count(b",")
                    if (size := length + VALUE_BYTES * values) > LONGEST_ROW:
                        self.faults.setdefault(number, too_long(size))
        except BaseException:
            self._map.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the file."""
        self._map.close()

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, number: int) -> bytes:
        """Return the bytes of one row, without white space before it (and, except in JSON lines, after it)."""
        return self._map[self.starts[number] : self.ends[number]]

    def __iter__(self) -> Iterator[bytes]:
        return map(self.__getitem__, range(len(self)))

    def span(self, number: int) -> tuple[int | None, int | None]:
        """Return a row's first byte in the file and the byte after its last; both None for parquet."""
        return self.starts[number], self.ends[number]

    def line(self, number: int) -> int | None:
        """Return the line of the file, counted from 1, on which a row begins; None for parquet."""
        start, _ = self.span(number)
        if start is None:
            return None
        line = 1
        with self.path.open("rb") as file:
            while start and (block := file.read(min(start, BLOCK_BYTES))):
                line += block.count(b"\n")
                start -= len(block)
        return line

    def row_of(self, text: str) -> tuple[bytes, str]:
        """Return the row in a text of this file's form, and "" or why it cannot be read."""
        return text.encode(), ""

    def shards(self, size: int) -> Iterator[range]:
        """Yield consecutive ranges of row numbers: about `size` bytes each, at least one row."""
        first = 0
        while first < len(self):
            last = max(bisect_right(self.ends, self.starts[first] + size), first + 1)
            yield range(first, last)
            first = last

    def _open(self) -> IO[bytes]:
        return self.path.open("rb")

    def _find_rows(self) -> Places:
        start = skip_white(self._map, len(BYTE_ORDER_MARK) if self._map[:3] == BYTE_ORDER_MARK else 0)
        if start == len(self._map):
            return _places([])
        of_lines = self.path.suffix.lower() == ".jsonl"
        begins = self._map[start : start + 1]
        closed = _closing_bracket(self._map) if begins == b"[" else None
        if begins == b"[" and not of_lines:
            return self._split_cut_array(start) if closed is None else self._split_array(start, closed)
        line = LINE.match(self._map, start).end()  # type: ignore[union-attr]  # the place is not white
        is_row = skip_white(self._map, line) < len(self._map) and end_of_value(self._map, start, line) == line
        if closed and not is_row and self._map[skip_white(self._map, start + 1)] == ord("{"):
            return self._split_array(start, closed)
        if begins == b"{" and not is_row:
            if around := AROUND_ROWS.match(self._map, start):
                return self._split_list_within(around.end(), around[1].decode())
            if is_long(self._map, start, line):
                return _places(long_objects(self._map, self.path, start))
        if begins == b"{" or of_lines:  # a broken first line is lost alone
            return _places(_lines(self._map, start))
        raise VlmflowError(
            f"{self.path}: neither a JSON array nor JSON lines",
            "give a JSON array or JSON lines (.json, .jsonl), a table with column names (.csv, .tsv with tabs), "
            "or .parquet; if it should be one of these, check what the file really is (an error page?)",
        )

    def _split_array(self, start: int, end: int) -> Places:
        lengths = self._lengths(start, end)
        if lengths is None:
            return _places(DamagedArray(self._map, self.path, start, end).spans())
        return self._sound(start, lengths)

    def _split_list_within(self, start: int, key: str) -> Places:
        """Return the rows of the list that an object ends with; one that is damaged cannot be told from two."""
        closed = _closing_bracket(self._map, within=True)
        lengths = None if closed is None else self._lengths(start, closed)
        if lengths is None:
            raise VlmflowError(
                f"{self.path}: an object holds the rows under its key {key!r}; more follows, or they are damaged",
                f"write only them, and name that file: jq -c '.{key}[]' {shlex.quote(self.path.name)} > rows.jsonl",
            )
        return self._sound(start, lengths)

    def _lengths(self, start: int, end: int) -> "array[int] | None":
        """Return the bytes of each row of the array between two brackets; None if the array is not sound."""
        with memoryview(self._map) as view, view[start : end + 1] as content:
            try:
                rows = msgspec.json.decode(content, type=list[msgspec.Raw])
            except (msgspec.DecodeError, RecursionError):
                return None
            views: Iterable[memoryview] = map(memoryview, rows)
            lengths = array("q", map(len, views))
            del rows, views
            return lengths

    def _sound(self, start: int, lengths: "array[int]") -> Places:
        starts = array("q")
        gap = BETWEEN.match
        at = skip_white(self._map, start + 1)
        for length in lengths:
            starts.append(at)
            at = gap(self._map, at + length).end()  # type: ignore[union-attr]  # it also matches the empty string
        return starts, array("q", map(add, starts, lengths))

    def _split_cut_array(self, start: int) -> NoReturn:
        starts, _ = _places(DamagedArray(self._map, self.path, start, len(self._map)).spans())
        begin = starts[-1] if starts else start + 1
        raise VlmflowError(
            f"{self.path}: row {max(0, len(starts) - 1)}, which begins at byte {begin}, has no end: "
            f"the file is cut at byte {len(self._map)}, before the bracket that closes its array",
            "fetch the file again; for a local copy, compare its size with the original's",
        )


def _closing_bracket(content: mmap.mmap, within: bool = False) -> int | None:
    """Return the place of the bracket that closes the file's array; None if the file ends with something else.

    within: an object ends with the array, and the file with the object.
    """
    end = without_white(content, 0, len(content))
    if within:
        end = without_white(content, 0, end - 1) if content[end - 1] == ord("}") else 0
    return end - 1 if end > 1 and content[end - 1] == ord("]") else None


def _lines(content: mmap.mmap, start: int) -> Iterator[tuple[int, int]]:
    """Yield where each line begins and ends, as LINE does, which takes ten times as long for long lines."""
    if content.find(b"\r", start) >= 0:
        yield from (match.span() for match in LINE.finditer(content, start))
        return
    size = len(content)
    while start < size:
        end = content.find(b"\n", start)
        if end < 0:
            end = size
        yield start, end
        start = skip_white(content, end)


def _places(spans: Iterable[tuple[int, int]]) -> Places:
    starts, ends = array("q"), array("q")
    for start, end in spans:
        starts.append(start)
        ends.append(end)
    return starts, ends
