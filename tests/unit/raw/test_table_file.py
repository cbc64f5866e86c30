"""Tables of parquet whose cells are objects."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vlmflow.core.errors import VlmflowError
from vlmflow.raw.split import open_rows
from workflow_runs import ROOT

CITY = {"type": "function", "function": {"name": "weather", "parameters": {"properties": {"city": {"type": "string"}}}}}
ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"properties": {"x": {"type": ["number", "null"]}}}},
}
NESTED = {
    "name": "find",
    "input_schema": {"properties": {"by": {"type": "object", "properties": {"day": {"type": "string"}}}}},
}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize(
    ("tools", "calls"),
    [
        ([CITY, ADD], [call("weather", city="Bonn"), call("add", x=1), call("add", x=None)]),
        ([CITY], [call("weather", city="Bonn"), call("weather")]),
    ],
)
def test_calls_and_declarations_have_no_keys_of_others(tools: Any, calls: Any, tmp_path: Path) -> None:
    """To Arrow they are structs, each with the keys of all others, as null; a null that the schema allows stays."""
    rows = [{"tools": tools, "messages": [{"role": "assistant", "tool_calls": [each]}]} for each in calls]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    with open_rows([tmp_path / "rows.parquet"], "train") as read:
        found = [json.loads(row) for row in read]
    for row, each in zip(found, calls, strict=True):
        assert row["tools"] == tools
        (made,) = row["messages"][0]["tool_calls"]
        given = each["function"]["arguments"]
        allowed = {"x": None} if each["function"]["name"] == "add" else {}
        assert made["function"]["arguments"] == allowed | given


def test_arguments_of_anthropics_calls_too(tmp_path: Path) -> None:
    parts = [{"type": "tool_use", "name": "find", "input": {"by": {"day": "Monday"}}}, {"type": "text", "text": "So."}]
    rows = [{"tools": [NESTED], "messages": [{"role": "assistant", "content": parts}]}]
    rows.append(
        {"tools": [NESTED], "messages": [{"role": "assistant", "content": [parts[0] | {"input": {"by": {"hour": 3}}}]}]}
    )
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    with open_rows([tmp_path / "rows.parquet"], "train") as read:
        first, second = [json.loads(row)["messages"][0]["content"][0]["input"] for row in read]
    assert (first, second) == ({"by": {"day": "Monday"}}, {"by": {"hour": 3}})


LONG = 1_000_000
"""Characters of a text that a file may have once, for many rows."""

SAME = "x" * LONG
NEARLY = [f"{number}{SAME}" for number in range(400)]
SMALL_FILES = {
    "one text for all rows": pa.table({"prompt": [SAME] * 400, "completion": ["a"] * 400}),
    "one text in all turns": pa.table({"prompt": [[{"role": "user", "content": SAME}]] * 400}),
    "texts that compress": pa.table({"prompt": NEARLY}),
    "pictures that compress": pa.table({"image": [text.encode() for text in NEARLY]}),
    "one text in an unread column": pa.table({"prompt": ["a"] * 400, "note": [SAME] * 400}),
}

READ = """
import re, resource, sys
from pathlib import Path
import pyarrow.compute, pyarrow.parquet
from vlmflow.core.errors import VlmflowError
from vlmflow.raw.split import open_rows
has = int(re.search(r"VmData:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (has + 400_000_000, -1))
with open_rows([Path(sys.argv[1])], "train", [], ["prompt", "completion", "image"]) as rows:
    print(len(rows), sum(map(len, rows)), sum(map(len, rows.files[0].unread_texts)), len(rows.faults))
"""


@pytest.mark.parametrize("name", SMALL_FILES)
def test_a_small_file_does_not_become_a_large_process(name: str, tmp_path: Path) -> None:
    """Files of some kilobytes, whose rows have 400 MB, which are there twice if all are read at once."""
    table, path = SMALL_FILES[name], tmp_path / "rows.parquet"
    pq.write_table(table, path, compression="zstd", use_dictionary="compress" not in name, write_batch_size=4)
    assert path.stat().st_size < 100_000
    read = [sys.executable, "-c", READ, str(path)]
    found = subprocess.run(read, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT / "scripts")})
    rows, characters, unread, _ = map(int, found.stdout.split() or [0, 0, 0, 0])
    assert rows == len(table), found.stderr
    assert characters >= (len(table) * LONG if "prompt" in table.column_names and "unread" not in name else len(table))
    assert unread == ("unread" in name) * len("note")


SHARED = pa.DictionaryArray.from_arrays(pa.array([0] * 2_001, pa.int32()), [SAME])
TURNS = pa.StructArray.from_arrays([SHARED], ["content"])
LONG_LINES = {
    "a field of 70 MB": b'q,"' + b"x" * 70_000_000 + b'"\nq,a\n',
    "a quotation without end": b'q,"' + b"x" * 70_000_000 + b"\nq,a\n",
}


@pytest.mark.parametrize("name", ["one row of parquet", *LONG_LINES])
def test_a_row_that_would_fill_the_memory_is_rejected_alone(name: str, tmp_path: Path) -> None:
    """Of 1 KB of parquet, a row of 2 GB between others; of CSV, what a quotation mark or a missing line end holds."""
    if name in LONG_LINES:
        path, expected = tmp_path / "rows.csv", LONG_LINES[name].count(b"\n")
        path.write_bytes(b"prompt,completion\n" + LONG_LINES[name])
    else:
        path, expected = tmp_path / "rows.parquet", 2_001
        rows = pa.ListArray.from_arrays(pa.array([0] + [1] * 2_000 + [2_001], pa.int32()), TURNS)
        pq.write_table(pa.table({"prompt": rows}), path, compression="zstd", store_schema=False)
    read = [sys.executable, "-c", READ, str(path)]
    found = subprocess.run(read, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT / "scripts")})
    rows, characters, _, faulty = map(int, found.stdout.split() or [0, 0, 0, 0])
    assert (rows, faulty) == (expected, 1), found.stderr
    assert characters < 30_000_000


@pytest.mark.parametrize(
    ("column", "read"),
    [
        (
            pa.array([[("a", "b")], [], [("c", "d")]], pa.map_(pa.string(), pa.string())),
            [[["a", "b"]], [], [["c", "d"]]],
        ),
        (pa.array([["a"], [], ["c"]], pa.list_view(pa.string())), [["a"], [], ["c"]]),
        (pa.array(["a", None, "c"], pa.string_view()), ["a", None, "c"]),
        (pa.array(["a", "b", "a"]).dictionary_encode(), ["a", "b", "a"]),
        (pa.array([1, 2, 1]).dictionary_encode(), [1, 2, 1]),
        (pa.array([{"a": [{"b": "c"}]}, None, {"a": None}]), [{"a": [{"b": "c"}]}, None, {"a": None}]),
    ],
    ids=lambda held: str(getattr(held, "type", "")),
)
def test_every_kind_of_column_is_measured_and_read(
    tmp_path: Path, column: pa.Array, read: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(pa.table({"column": column}), tmp_path / "rows.parquet")
    for most in (200, 1 << 20):  # in halves, and at once
        monkeypatch.setattr("vlmflow.raw.table_file.BATCH_BYTES", most)
        with open_rows([tmp_path / "rows.parquet"], "train") as rows:
            assert [json.loads(row)["column"] for row in rows] == read


def test_a_column_that_compresses_too_well_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyArrow writes 1,024 rows into one page, which is decompressed at once."""
    monkeypatch.setattr("vlmflow.raw.table_file.GROUP_BYTES", 500_000)
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"a": ["b"], "text": [SAME]}), path, compression="zstd", use_dictionary=False)
    with pytest.raises(
        VlmflowError, match=r"'text' of row group 0 has 1,000,\d+ bytes in the memory, \d+ in the file\n.*smaller"
    ):
        open_rows([path], "train")
    with open_rows([path], "train", [], ["a"]) as rows:
        assert list(rows) == [b'{"a":"b"}'], "a column that is not read may be as it likes"
