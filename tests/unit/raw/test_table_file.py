"""Tables of parquet whose cells are objects."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vlmflow.raw.split import open_rows

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
