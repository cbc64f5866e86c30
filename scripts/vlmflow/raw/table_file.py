"""The rows of a table, CSV (see csv_file) or parquet, as JSON objects whose keys are the column names.

A table is read once from its beginning to its end, in small pieces. Its rows go as JSON into a temporary file (in
TMPDIR) that has no name and disappears with the process. From there they are read by number, like those of a JSON file,
by any number of processes.
"""

import tempfile
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import msgspec

from vlmflow.config.raw_forms import INSIDE, folded
from vlmflow.core.errors import VlmflowError
from vlmflow.core.progress import Progress
from vlmflow.raw.damaged_file import ANOTHER_FILE
from vlmflow.raw.json_file import LONGEST_ROW, VALUE_BYTES, JsonRows, Places, too_long
from vlmflow.raw.named import name_of

LOOKED_AT = 200
"""How many rows are looked at to find what they are, from the first one on."""

BATCH_ROWS = 2048
"""Rows that are in memory at a time."""

BATCH_BYTES = 16_000_000
"""Bytes of values that become objects of Python at a time; a row may have more, and is then alone."""

LEVEL_BYTES = 8
"""The least bytes that PyArrow holds for a value, also where a file has many equal ones in a few."""

GROUP_BYTES = 500_000_000
MOST_COMPRESSED = 100
"""A column with more bytes than this in a row group, compressed more than so many times, is refused."""

NAMERS = 4
"""Threads that name pictures, and write them: both leave Python to others."""

TEXT = "text"
"""What messages call the content of a text column; every column of CSV is one."""

BYTES = "bytes"
NO_JSON = "bytes among other values"

SCHEMAS = ("parameters", "input_schema")
ARGUMENTS = ("arguments", "input")
"""The keys of a function's declaration, and of a call, whose objects may have any keys (OpenAI, Anthropic)."""

ENCODER = msgspec.json.Encoder()
NO_VALUE = (ValueError, TypeError, OverflowError, KeyError)
"""What a cell raises that Python or JSON cannot represent: not UTF-8, a date after 9999, an unknown time zone."""


class TableRows(JsonRows):
    """The rows of one table, in order, to be read by number.

    unit: what the progress of reading counts: rows, or bytes if the number of rows is not known before the end.

    Raises VlmflowError if the file is missing, empty, truncated, or not of the type in its name.
    """

    unit = "rows"
    columns: dict[str, str]

    def __init__(self, path: Path) -> None:
        self._starts, self._ends = array("q"), array("q")
        super().__init__(path)

    def _find_rows(self) -> Places:
        return self._starts, self._ends

    def _open(self) -> IO[bytes]:
        spool = tempfile.TemporaryFile()  # noqa: SIM115 (whoever maps it closes it)
        end = 0
        with Progress(f"reading {self.path}", 0, self.unit) as self._progress:
            for line in self._lines():
                self._starts.append(end)
                with self._disk_errors_said():
                    spool.write(line)
                end += len(line)
                self._ends.append(end)
        if not self._starts:
            raise VlmflowError(f"{self.path}: the table has no rows", ANOTHER_FILE)
        with self._disk_errors_said():
            spool.flush()
        return spool

    @contextmanager
    def _disk_errors_said(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise VlmflowError(
                f"{self.path}: its rows do not fit in {tempfile.gettempdir()}: {error.strerror}",
                "free space there, or set TMPDIR to a folder on a larger disk",
            ) from None

    def _lines(self) -> Iterator[bytes]:
        """Yield the rows as JSON. For a row that cannot be read, add its fault to `faults`, and yield its text or null.

        Sets the total of `self._progress`, and advances it.
        """
        raise NotImplementedError


class ParquetRows(TableRows):
    """The rows of a parquet file. Pictures in the file itself have the names of `embedded`; other bytes are not read.

    read_columns: the columns to read, if present, in any letter case; None for all. The others cost nothing, whatever
    they hold. Structs with a key that may change what a row means are read, too.
    """

    def __init__(self, path: Path, read_columns: Collection[str] | None = None) -> None:
        self._read_columns = read_columns
        super().__init__(path)

    def span(self, number: int) -> tuple[None, None]:
        """Return no bytes: in parquet, a row is in as many places as there are columns."""
        return None, None

    def _lines(self) -> Iterator[bytes]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            with pq.ParquetFile(self.path, memory_map=True) as table:
                fields = table.schema_arrow
                self.columns = {field.name: _says(field.type) for field in fields}
                if twice := [name for name in self.columns if len(fields.get_all_field_indices(name)) > 1]:
                    raise VlmflowError(
                        f"{self.path}: has more than one column {twice[0]!r}", "give every column a name of its own"
                    )
                wanted = set(map(folded, self.columns if self._read_columns is None else self._read_columns))
                wanted |= {folded(field.name) for field in fields if _changes_meaning(field.type)}
                readable = [name for name, holds in self.columns.items() if holds != NO_JSON and folded(name) in wanted]
                self.unread_columns = [name for name in self.columns if name not in readable]
                self._pictures = [name for name in readable if self.columns[name] in (BYTES, f"list of {BYTES}")]
                free = tuple(f"{key}: struct<" for key in SCHEMAS + ARGUMENTS)
                self._padded = any(mark in str(fields.field(name).type) for name in readable for mark in free)
                self._progress.total = table.metadata.num_rows
                self._schema = fields
                groups = map(table.metadata.row_group, range(table.num_row_groups))
                chunks = (group.column(place) for group in groups for place in range(group.num_columns))
                as_numbers = list({chunk.path_in_schema for chunk in chunks if chunk.has_dictionary_page})
            with (
                pq.ParquetFile(self.path, memory_map=True, read_dictionary=as_numbers) as table,
                ThreadPoolExecutor(NAMERS) as pool,
            ):
                self._look_at_texts(table)
                each = pool.map if self._pictures else map
                for group in range(table.num_row_groups):
                    size = self._rows_at_a_time(table, group, readable)
                    for batch in table.iter_batches(size, row_groups=[group], columns=readable, use_threads=False):
                        yield from self._rows_of(batch, each)
                        self._progress.advance(len(batch))
                pa.default_memory_pool().release_unused()  # else each process of the stage is as large
        except (OSError, ValueError, pa.ArrowException) as error:
            raise VlmflowError(f"{self.path}: {error}", "fetch or write the file again") from None

    def _look_at_texts(self, table: Any) -> None:
        """Set `unread_texts`: what the first rows have in columns of texts that are not read."""
        texts = [name for name in self.unread_columns if self.columns[name] == TEXT or "string" in self.columns[name]]
        if not texts:
            return
        with suppress(*NO_VALUE, VlmflowError):  # not UTF-8, or too large
            size = min(LOOKED_AT, self._rows_at_a_time(table, 0, texts))
            batch = next(table.iter_batches(size, columns=texts, use_threads=False))
            while len(batch) and sum(map(_size, batch.columns)) > BATCH_BYTES:
                batch = batch.slice(0, len(batch) // 2)
            self.unread_texts = batch.to_pydict()

    def _rows_at_a_time(self, table: Any, group: int, names: Collection[str]) -> int:
        """Return how many rows of a row group are in memory at a time. names: the columns that are read.

        Raises VlmflowError if a column may not fit in memory: pages are decompressed whole, and a few kilobytes may be
        a page of any size.
        """
        rows = table.metadata.row_group(group)
        total = 1
        for chunk in map(rows.column, range(rows.num_columns)):
            name = chunk.path_in_schema.partition(".")[0]
            size = chunk.total_uncompressed_size + LEVEL_BYTES * chunk.num_values
            if name not in names:
                continue
            if size > max(GROUP_BYTES, MOST_COMPRESSED * chunk.total_compressed_size):
                raise VlmflowError(
                    f"{self.path}: column {name!r} of row group {group} has {size:,} bytes in the memory, "
                    f"{chunk.total_compressed_size:,} in the file",
                    "write the table with smaller row groups",
                )
            total += size
        return int(max(1, min(BATCH_ROWS, BATCH_BYTES * rows.num_rows // total)))

    def _rows_of(
        self, batch: Any, each: Callable[..., Iterable[bytes | Exception]], whole: bool = True
    ) -> Iterator[bytes]:
        """Yield the rows of a batch as JSON. each: like `map`. whole: whether it is a batch as it was read."""
        size = sum(map(_size, batch.columns))
        if len(batch) > 1 and size > BATCH_BYTES:
            half = len(batch) // 2
            yield from self._rows_of(batch.slice(0, half), each, whole=False)
            yield from self._rows_of(batch.slice(half), each, whole=False)
            return
        rows: list[dict[str, Any] | Exception]
        try:
            if size > LONGEST_ROW:
                rows = [ValueError(too_long(size))]
            else:
                rows = (self._with_texts(batch) if whole else batch).to_pylist()
        except NO_VALUE:
            rows = [self._row_of(batch.slice(number, 1)) for number in range(len(batch))]
        for line in each(self._line, rows):
            if isinstance(line, Exception):
                self.faults[len(self._starts)] = str(line)
                line = ENCODER.encode(None)
            yield line

    def _with_texts(self, batch: Any) -> Any:
        """Return a batch with texts instead of their numbers, which takes half the time of looking up each.

        PyArrow would make all texts of which the batch is a slice.
        """
        import pyarrow as pa

        for place, name in enumerate(batch.schema.names):
            with suppress(pa.ArrowNotImplementedError):  # a few kinds cannot, as string_view; each is looked up
                batch = batch.set_column(place, name, batch.column(place).cast(self._schema.field(name).type))
        return batch

    def _line(self, row: dict[str, Any] | Exception) -> bytes | Exception:
        if isinstance(row, Exception):
            return row
        try:
            for name in self._pictures:
                row[name] = _named(row[name])
            if self._padded:
                _remove_padding(row)
            return ENCODER.encode(row)
        except NO_VALUE as error:
            return error

    def _row_of(self, batch: Any) -> dict[str, Any] | Exception:
        try:
            row: dict[str, Any] = batch.to_pylist()[0]
            return row
        except NO_VALUE as error:
            return error


def _size(values: Any) -> int:
    """Return about how many bytes the values of an array have as objects of Python, each text for itself."""
    import pyarrow.compute as pc
    import pyarrow.types as types

    size, kind = VALUE_BYTES * len(values), values.type
    if types.is_dictionary(kind):
        if types.is_nested(kind.value_type) or types.is_primitive(kind.value_type):
            return size
        return size + (pc.sum(pc.binary_length(values.dictionary).take(values.indices)).as_py() or 0)
    if types.is_struct(kind):
        return size + sum(map(_size, values.flatten()))
    if types.is_map(kind):  # PyArrow does not flatten one of dictionaries
        begin, end = values.offsets[0].as_py(), values.offsets[-1].as_py()
        return size + sum(_size(each.slice(begin, end - begin)) for each in (values.keys, values.items))
    return size + (_size(values.flatten()) if types.is_nested(kind) else values.nbytes)


def _changes_meaning(kind: Any) -> bool:
    import pyarrow.types as types

    return types.is_struct(kind) and any(folded(field.name) in INSIDE for field in kind)


def _remove_padding(row: dict[str, Any]) -> None:
    """Remove the null keys from a row's declarations and calls, except where a schema allows null.

    To Arrow, the objects of a column are structs, each with the keys of all others: a call would have the arguments of
    all tools.
    """
    schemas: dict[object, Any] = {}
    for held in list(_objects(row)):
        for key in SCHEMAS:
            if isinstance(held.get(key), dict):
                without = _without_nulls(held)
                held.clear()
                held.update(without)
                schemas[held.get("name")] = held[key]
        if isinstance(held.get("function"), dict):
            for key in [key for key, value in held.items() if value is None]:
                del held[key]
    for held in _objects(row):
        for key in ARGUMENTS:
            if isinstance(held.get(key), dict):
                held[key] = _given(held[key], schemas.get(held.get("name"), {}))


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    """Yield all objects in a value but those in schemas and arguments."""
    if isinstance(value, dict):
        yield value
        for key, inner in value.items():
            if key not in SCHEMAS + ARGUMENTS or isinstance(inner, list):
                yield from _objects(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _objects(inner)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        nullable = _allows_null(value)
        kept = {key: inner for key, inner in value.items() if inner is not None or (key == "default" and nullable)}
        return {key: _without_nulls(inner) for key, inner in kept.items()}
    return list(map(_without_nulls, value)) if isinstance(value, list) else value


def _given(value: Any, schema: Any) -> Any:
    """Return arguments without the keys that are null, unless their schema (JSON Schema) allows it."""
    described = schema if isinstance(schema, dict) else {}
    if isinstance(value, list):
        return [_given(item, described.get("items")) for item in value]
    if not isinstance(value, dict):
        return value
    properties = described.get("properties")
    each = properties if isinstance(properties, dict) else {}
    kept = {key: inner for key, inner in value.items() if inner is not None or _allows_null(each.get(key))}
    return {key: _given(inner, each.get(key)) for key, inner in kept.items()}


def _allows_null(schema: Any) -> bool:
    if not isinstance(schema, dict):
        return False
    kinds = schema.get("type")
    values = schema.get("enum")
    return (
        "null" in (kinds if isinstance(kinds, list) else [kinds])
        or schema.get("nullable") is True
        or (isinstance(values, list) and None in values)
        or any(_allows_null(each) for key in ("anyOf", "oneOf") for each in schema.get(key) or [])
    )


def _says(kind: Any) -> str:
    """Return what a parquet column holds: TEXT, BYTES (pictures), NO_JSON (with other bytes), else parquet's name."""
    import pyarrow.types as types

    if types.is_dictionary(kind):
        return _says(kind.value_type)
    if types.is_null(kind):
        return str(kind)
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return TEXT
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    if is_list and not types.is_null(kind.value_type) and _is_picture(kind.value_type):
        return f"list of {BYTES}"
    if _is_picture(kind):
        return BYTES
    return NO_JSON if "binary" in str(kind) else str(kind)


def _is_picture(kind: Any) -> bool:
    """Return whether values of a type are pictures: bytes, or the bytes and the path of the library `datasets`."""
    import pyarrow.types as types

    if types.is_struct(kind):
        fields = {field.name: field.type for field in kind}
        return fields.keys() <= {"bytes", "path"} and "bytes" in fields and _is_picture(fields["bytes"])
    kinds = types.is_null, types.is_binary, types.is_large_binary, types.is_binary_view
    return any(test(kind) for test in kinds)


def _named(cell: Any) -> Any:
    """Return the name of a picture, or a list of names; null stays null, as does a picture without bytes and path."""
    if isinstance(cell, list):
        return [_named(item) for item in cell]
    if isinstance(cell, dict):
        return (cell.get("path") or cell) if cell["bytes"] is None else name_of(cell["bytes"])
    return None if cell is None else name_of(cell)
