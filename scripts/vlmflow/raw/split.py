"""The rows of a raw split, whatever form its files have, with fixed rows in place of raw ones."""

from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from itertools import accumulate, chain
from pathlib import Path
from typing import Literal, NamedTuple, Self
from zlib import crc32

import msgspec

from vlmflow.core.errors import VlmflowError
from vlmflow.raw.csv_file import CSV_DIALECTS, CsvRows
from vlmflow.raw.damaged_file import ANOTHER_FILE, PARQUET, refuse_other_kinds
from vlmflow.raw.json_file import JsonRows
from vlmflow.raw.rewritten import key_fault
from vlmflow.raw.table_file import ParquetRows


class _FixedRow(msgspec.Struct):
    split: Literal["train", "val", "test"]
    row: int
    file: str
    checksum: str
    raw: msgspec.Raw


SHARD_BYTES = 1 << 20
"""Raw bytes that a worker takes at a time: enough to make the cost of passing them on small, and little memory."""

FIXED_ROW = msgspec.json.Decoder(_FixedRow)


class Place(NamedTuple):
    """The place of a raw row: its file, its number there, its first byte there and the byte after its last.

    In a parquet file, a row has no such bytes: they are None.
    """

    file: Path
    row: int
    start: int | None
    end: int | None


class RawRows:
    """The rows of a raw split, numbered across its files in their order, to be read by number.

    files: at least one.
    fixed: by row number, the fixed row that replaces the raw one.
    faults: by row number, why the row, or the fixed one, could not be read as a table's row.
    """

    def __init__(self, files: Sequence[JsonRows]) -> None:
        self.files = files
        self.fixed: dict[int, bytes] = {}
        self._ends = list(accumulate(map(len, files)))
        self.faults = {first + row: fault for first, file in self._firsts() for row, fault in file.faults.items()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self.files:
            file.close()

    def __str__(self) -> str:
        """Return the path of the first file, and how many more there are, for messages."""
        others = len(self.files) - 1
        return f"{self.files[0].path}" + (f" and {others} more" if others else "")

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, number: int) -> bytes:
        """Return the bytes of one row as its file gives them, or of the fixed row that replaces it."""
        return next(self.of(range(number, number + 1)))

    def __iter__(self) -> Iterator[bytes]:
        return chain.from_iterable(self.of(range(first, first + len(file))) for first, file in self._firsts())

    def of(self, shard: range) -> Iterator[bytes]:
        """Return the bytes of a shard's rows, as `__getitem__` does; a shard is in one file."""
        first, file = self._file_of(shard.start)
        rows = map(file.__getitem__, range(shard.start - first, shard.stop - first))
        if not self.fixed:
            return rows
        return (self.fixed.get(number, row) for number, row in zip(shard, rows, strict=True))

    def unread_columns(self, shard: range) -> list[str]:
        """Return the columns of a shard's file that are not read; see JsonRows."""
        return self._file_of(shard.start)[1].unread_columns

    def fix(self, number: int, row: bytes | str) -> None:
        """Replace a row by an edited one: bytes as they are, a text in the file's own form (a CSV line).

        Null changes nothing, nor does a row that was not edited: JSON of the same values, however it is written.
        """
        first, file = self._file_of(number)
        raw = file[number - first]
        fault = ""
        if isinstance(row, str):
            is_text = number - first in file.faults
            if row == (msgspec.json.decode(raw) if is_text else raw.decode(errors="backslashreplace")):
                return
            row, fault = file.row_of(row)
        if row in (b"null", raw) or (not fault and _same_values(row, raw)):
            return
        self.fixed[number] = row
        self.faults.pop(number, None)
        if fault:
            self.faults[number] = fault

    def locate(self, number: int) -> Place:
        """Return where a raw row stands. number: from 0, across all files of the split."""
        first, file = self._file_of(number)
        return Place(file.path, number - first, *file.span(number - first))

    def named(self, number: int) -> str:
        """Describe a row for messages: its number from 0, its file if there are several, its line and its first byte.

        Reads the file up to there.
        """
        first, file = self._file_of(number)
        where = [file.path.name] if len(self.files) > 1 else []
        if (line := file.line(number - first)) is not None:
            where += [f"line {line}", f"byte {file.span(number - first)[0]}"]
        return f"row {number} ({', '.join(where)})" if where else f"row {number}"

    def checksum(self, number: int) -> str:
        """Return the CRC-32 of a raw row's bytes, in 8 hexadecimal digits, ignoring any fixed row.

        For a table's row, these are the bytes of its JSON; for parquet, this has only the columns that are read.
        """
        first, file = self._file_of(number)
        return f"{crc32(file[number - first]):08x}"

    def shards(self, size: int) -> Iterator[range]:
        """Yield consecutive ranges of row numbers: about `size` bytes each, at least one row, in one file."""
        for first, file in self._firsts():
            for shard in file.shards(size):
                yield range(first + shard.start, first + shard.stop)

    def _firsts(self) -> Iterator[tuple[int, JsonRows]]:
        return zip([0, *self._ends], self.files, strict=False)

    def _file_of(self, number: int) -> tuple[int, JsonRows]:
        index = bisect_right(self._ends, number)
        return (self._ends[index - 1] if index else 0), self.files[index]


def open_rows(
    raw: Sequence[Path], split: str, fixed_rows: Sequence[Path] = (), columns: Collection[str] | None = None
) -> RawRows:
    """Open a raw split's files. By name, .parquet, .csv and .tsv are tables, all else is JSON.

    fixed_rows: edited quarantine files; their rows of this split replace the raw rows, and later files win.
    columns: the columns to read from parquet; None for all. Checksums cover the columns that are read, so every stage
    that uses fixed rows reads the same columns.

    Raises VlmflowError if a file cannot be read or has no rows, or if fixed rows do not belong to these files.
    """
    with ExitStack() as opened:
        rows = RawRows([opened.enter_context(_open(file, columns)) for file in raw])
        for file in fixed_rows:
            _fix(rows, file, split)
        opened.pop_all()
    return rows


def _open(raw: Path, columns: Collection[str] | None) -> JsonRows:
    refuse_other_kinds(raw)
    suffix = raw.suffix.lower()
    if suffix == PARQUET:
        return ParquetRows(raw, columns)
    rows = CsvRows(raw) if suffix in CSV_DIALECTS else JsonRows(raw)
    if not len(rows):
        rows.close()
        raise VlmflowError(f"{raw}: has no rows", ANOTHER_FILE)
    return rows


def _same_values(row: bytes, raw: bytes) -> bool:
    """Return whether two rows are JSON of the same values; 1, 1.0 and true differ, and a raw row with a key twice."""
    try:
        first, other = (msgspec.json.encode(msgspec.json.decode(text), order="deterministic") for text in (row, raw))
    except (ValueError, OverflowError, RecursionError):
        return False
    return first == other and not key_fault(raw)


def _fix(rows: RawRows, file: Path, split: str) -> None:
    """Replace the rows of a split by those of an edited quarantine file."""
    seen: dict[tuple[str, int], int] = {}
    try:
        lines = file.read_bytes().rstrip().splitlines()
    except OSError as error:
        raise VlmflowError(f"{file}: {error.strerror}", "fix its path (datasets.NAME.fixed_rows)") from None
    if not lines:
        raise VlmflowError(f"{file}: has no rows", "copy quarantine.jsonl again, or remove datasets.NAME.fixed_rows")
    for number, line in enumerate(lines, start=1):
        where = f"{file}, line {number}"
        row, raw = _read_fixed_row(line, where)
        if (first := seen.setdefault((row.split, row.row), number)) != number:
            raise VlmflowError(
                f"{where}: row {row.row} of the {row.split} split is already in line {first}", "remove one of them"
            )
        if row.split == split:
            _refuse_another(row, rows, where)
            rows.fix(row.row, raw)


def _read_fixed_row(line: bytes, where: str) -> tuple[_FixedRow, bytes | str]:
    """Return a line, and its row: the text if `raw` is one, or the bytes of any other JSON."""
    if not line.strip():
        raise VlmflowError(f"{where}: is empty", "remove the line")
    try:
        row = FIXED_ROW.decode(line)
        raw = bytes(row.raw)
        return row, msgspec.json.decode(raw) if raw[:1] == b'"' else raw
    except (ValueError, RecursionError) as error:
        raise VlmflowError(
            f"{where}: {error}",
            "each line must be JSON with split, row, file, checksum and raw, as in quarantine.jsonl",
        ) from None


def _refuse_another(row: _FixedRow, rows: RawRows, where: str) -> None:
    """Refuse a fixed row whose raw row is missing or has changed."""
    names = {file.path.name for file in rows.files}
    if Path(row.file).name not in names:
        raise VlmflowError(
            f"{where}: it fixes {row.file}, but the {row.split} split of this data set is {rows}: this is the "
            "quarantine of another data set or file",
            "name a copy of this data set's own quarantine (datasets.NAME.fixed_rows)",
        )
    if not 0 <= row.row < len(rows) or Path(row.file).name != rows.locate(row.row).file.name:
        raise VlmflowError(
            f"{where}: row {row.row} (counted from 0) of {row.file} is not in {rows}, which has {len(rows)} rows",
            "name a copy of this data set's own quarantine, made from these files (datasets.NAME.fixed_rows)",
        )
    if row.checksum != rows.checksum(row.row):
        raise VlmflowError(
            f"{where}: row {row.row} of {row.file} has changed: its checksum is {rows.checksum(row.row)}, the "
            f"fixed row was made from {row.checksum[:20]}",
            "the raw file or the columns to read have changed, or the quarantine is another data set's: remove "
            "datasets.NAME.fixed_rows, run the data set again, and fix its new quarantine.jsonl",
        )
