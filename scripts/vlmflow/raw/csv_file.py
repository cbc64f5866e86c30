"""The rows of a CSV file: a broken row is rejected alone, whatever it contains.

Python's `csv` parses. The code around it is our own, because neither `csv` nor pyarrow's reader gives the byte at which
a row begins, and after an open quotation mark both return all rows up to the next mark as one.
"""

import csv
import io
import os
import re
import sys
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Self

from vlmflow.core.errors import VlmflowError
from vlmflow.raw.damaged_file import to_utf_8
from vlmflow.raw.json_file import BYTE_ORDER_MARK, Places
from vlmflow.raw.table_file import ENCODER, TEXT, TableRows

CSV_DIALECTS = {".csv": "excel", ".tsv": "excel-tab"}

SEPARATOR_LINE = re.compile(rb'(?:\xef\xbb\xbf)?"?sep=."?\r?\n')
"""The line `sep=,` that Excel reads and many programs write for it; a byte order mark may be before it."""

INDEX = "Unnamed: 0"
"""What pandas calls a first column without a name: the index that it wrote itself."""

LONGEST_RECORD = 1 << 24
"""The most bytes of a row of several lines: after a stray quotation mark, memory would hold all up to the next one."""

LONGEST_LINE = 1 << 26
"""The most bytes of a line, for which memory holds up to 14 times as many; a longer one is rejected."""

SHOWN_OF_LINE = 1_000
"""Bytes of a line that is too long that its reject has."""


class CsvRows(TableRows):
    """The rows of a CSV file in UTF-8, with a header; a row with another number of fields is faulty.

    If a row of several lines is faulty, or longer than LONGEST_RECORD bytes, only its first line is rejected, and the
    other lines are read again as rows of their own. Otherwise an extra quotation mark would swallow all rows up to the
    next one.
    """

    unit = "bytes"

    def __init__(self, path: Path) -> None:
        self._places: Places = (array("q"), array("q"))
        self._dialect = CSV_DIALECTS[path.suffix.lower()]
        super().__init__(path)

    def span(self, number: int) -> tuple[int, int]:
        """Return a row's first byte in the CSV file and the byte after its last."""
        return self._places[0][number], self._places[1][number]

    def row_of(self, text: str) -> tuple[bytes, str]:
        """Return the row in a CSV line as JSON, with the header's names as keys, and "".

        If the line is faulty, return its text as JSON, and the fault.
        """
        try:
            records = [
                fields for fields in csv.reader(io.StringIO(text, newline=""), self._dialect, strict=True) if fields
            ]
        except csv.Error as error:
            return ENCODER.encode(text), str(error)
        if len(records) != 1:
            return ENCODER.encode(text), f"{len(records)} rows instead of one"
        if fault := self._wrong_count(records[0]):
            return ENCODER.encode(text), fault
        return self._object(records[0]), ""

    def _lines(self) -> Iterator[bytes]:
        csv.field_size_limit(sys.maxsize)
        with self.path.open("rb") as file:
            self._progress.total = os.fstat(file.fileno()).st_size
            lines = _CountedLines(file)
            reader = csv.reader(lines, self._dialect, strict=True)
            lines.skip_separator()
            self.columns = self._header(lines, reader)
            again = 0
            while True:
                start = lines.begin_row()
                fault = ""
                try:
                    fields = next(reader)
                except StopIteration:
                    return
                except csv.Error as error:
                    fields, fault = [], str(error)
                    if lines.ended and start >= again:
                        raise VlmflowError(
                            f"{self.path}: row {len(self._starts)}, which begins at byte {start}, has no end: {error}",
                            "close the quotation mark there; or, if the file is cut, fetch it again",
                        ) from None
                if fields and not fault:
                    fault = self._wrong_count(fields) or self._swallows(lines.record)
                if fault and len(lines.record) > 1:
                    again = lines.end
                    lines.give_back()
                if fields or fault:  # an empty line is not a row
                    self._places[0].append(start)
                    self._places[1].append(lines.end)
                    yield self._row(fields, fault, lines.record)
                self._progress.advance(lines.end - self._progress.count)

    def _header(self, lines: "_CountedLines", reader: Iterator[list[str]]) -> dict[str, str]:
        fault, names = "", []
        try:
            names = next(reader, [])
        except csv.Error as error:
            fault = str(error)
        try:
            b"".join(lines.record).decode()
        except UnicodeDecodeError:
            raise VlmflowError(f"{self.path}: the header is not UTF-8", to_utf_8(self.path)) from None
        if fault:
            raise VlmflowError(f"{self.path}: the header: {fault}", "fix the first line of the file")
        if names[:1] == [""] and names[1:]:
            names[0] = INDEX
        if not all(names) or len(set(names)) != len(names) or not names:
            raise VlmflowError(
                f"{self.path}: the header {names} must give every column a name of its own",
                "write the names of the columns into the first line of the file",
            )
        if len(names) == 1 and ";" in names[0]:
            parted = "tabs" if self._dialect == "excel-tab" else "commas"
            raise VlmflowError(
                f"{self.path}: the header {names[0]!r} is one field with semicolons; the separator of "
                f"{self.path.suffix} is {parted}",
                f"save the table with {parted} between its fields",
            )
        return dict.fromkeys(names, TEXT)

    def _wrong_count(self, fields: list[str]) -> str:
        """Return the fault of a row whose number of fields differs from the header's; "" if it is the same."""
        same = len(fields) == len(self.columns)
        return "" if same else f"{len(fields)} fields, the header has {len(self.columns)}"

    def _swallows(self, record: list[bytes]) -> str:
        """Return the fault of a row of several lines between tabs, each with as many fields as the header.

        Most programs that write tabs quote nothing: a mark that begins a text would hold all up to one that ends one.
        """
        tabs = len(self.columns) - 1 if self._dialect == "excel-tab" else 0
        if not tabs or len(record) == 1 or any(line.count(b"\t") != tabs for line in record):
            return ""
        return f"a quotation mark holds {len(record)} lines, each with {tabs + 1} fields"

    def _object(self, fields: list[str]) -> bytes:
        return ENCODER.encode(dict(zip(self.columns, fields, strict=False)))

    def _row(self, fields: list[str], fault: str, record: list[bytes]) -> bytes:
        try:
            line = self._object(fields)
        except UnicodeEncodeError:
            fault = "not in UTF-8"
        if fault:
            self.faults[len(self._starts)] = sys.intern(fault)  # a file may have millions of one
            line = ENCODER.encode(b"".join(record).decode(errors="backslashreplace"))
        return line


class _CountedLines:
    """The lines of a file, for csv.reader.

    end: the byte after the last line read. ended: whether no more follow. record: the lines of the current row.

    Raises csv.Error for a row of several lines that is longer than LONGEST_RECORD, and a line longer than LONGEST_LINE.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._start = 0
        self.end = 0
        self.ended = False
        self.record: list[bytes] = []

    def __iter__(self) -> Self:
        return self

    def begin_row(self) -> int:
        """Let the next line be the first one of a row; return its first byte."""
        self.record.clear()
        self._start = self.end
        return self._start

    def __next__(self) -> str:
        if self.record and self.end - self._start > LONGEST_RECORD:
            raise csv.Error(f"a quotation is not closed within {LONGEST_RECORD:,} bytes")
        line = self._file.readline(LONGEST_LINE)
        if not line:
            self.ended = True
            raise StopIteration
        first = self.end == 0
        self.end += len(line)
        if len(line) == LONGEST_LINE and not line.endswith(b"\n"):
            self.record.append(line[:SHOWN_OF_LINE])
            while line and not line.endswith(b"\n"):
                line = self._file.readline(LONGEST_LINE)
                self.end += len(line)
            raise csv.Error(f"a line has more than {LONGEST_LINE:,} bytes")
        self.record.append(line)
        return (line.removeprefix(BYTE_ORDER_MARK) if first else line).decode(errors="surrogateescape")

    def skip_separator(self) -> None:
        """Skip a first line that only names the separator; the header follows."""
        line = self._file.readline()
        if SEPARATOR_LINE.fullmatch(line):
            self.end = len(line)
        self._file.seek(self.end)

    def give_back(self) -> None:
        """Take back all lines of the row but its first; they are read again from the file.

        No line is taken back more than twice: if one opens a quotation, the next line with an unmatched quotation mark
        ends it.
        """
        del self.record[1:]
        self.end = self._start + len(self.record[0])
        self._file.seek(self.end)
        self.ended = False
