import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlmflow.errors import VlmflowError
from vlmflow.json_rows import JsonRows


def rows_of(tmp_path: Path, content: bytes) -> list[bytes]:
    path = tmp_path / "raw.json"
    path.write_bytes(content)
    with JsonRows(path) as rows:
        assert len(rows) == len(list(rows))
        return list(rows)


def test_a_sound_array_is_split_into_its_rows(tmp_path: Path) -> None:
    assert rows_of(tmp_path, b' [ {"a": 1} ,\n{"b": "],["}\n,3 ] \n') == [b'{"a": 1}', b'{"b": "],["}', b"3"]
    assert rows_of(tmp_path, b"[]") == rows_of(tmp_path, b"[ \n ]") == []


def test_json_lines_are_read_too(tmp_path: Path) -> None:
    assert rows_of(tmp_path, b'{"a":1}\r\n\r\n{"b":2}\n{bad\n') == [b'{"a":1}', b'{"b":2}', b"{bad"]


@pytest.mark.parametrize(
    ("broken", "left"),
    [
        (b'{"a": NaN}', b'{"a": NaN}'),
        (b'{"a": "\\ud800"}', b'{"a": "\\ud800"}'),
        (b"\x00", b"\x00"),
        (b"{'a': 1}", b"{'a': 1}"),
        (b'{"a": 01}', b'{"a": 01}'),
        (b"[" * 10_000 + b"]" * 10_000, b"[" * 10_000 + b"]" * 10_000),
        (b"", b""),
    ],
)
def test_a_broken_row_costs_nothing_but_itself(tmp_path: Path, broken: bytes, left: bytes) -> None:
    """Case 19: NaN, NUL, a lone surrogate, single quotes, a depth of 10,000: one row each, none lost around it."""
    assert rows_of(tmp_path, b'[{"x": 1}, ' + broken + b' ,{"y": "]"}]') == [b'{"x": 1}', left, b'{"y": "]"}']


@given(
    damages=st.dictionaries(
        st.integers(0, 9),
        st.sampled_from(["quote", "open", "close", "no_close", "extra", "cut", "colon"]),
        max_size=4,
    ),
    indent=st.sampled_from([None, 0, 2]),
)
def test_broken_rows_cost_no_sound_one(tmp_path_factory, damages: dict[int, str], indent: int | None) -> None:
    """Case 19: quotes and brackets too many or too few, in several rows of one file."""
    turn = {"role": "a", "value": 'x [1], {2} "'}
    sound = [json.dumps({"image": f"{number}.jpg", "turns": [turn, turn]}, indent=indent) for number in range(10)]
    rows = [damaged(row, damages.get(number)) for number, row in enumerate(sound)]
    path = tmp_path_factory.mktemp("rows") / "raw.json"
    path.write_text("[" + ",\n".join(rows) + "]")
    with JsonRows(path) as found:
        assert [row.decode() for row in found] == [row.strip() for row in rows]


def damaged(row: str, damage: str | None) -> str:
    match damage:
        case "quote":
            return row.replace("x [", 'x" [', 1)
        case "open":
            return row.replace("[", "[[", 1)
        case "close":
            return row.replace("]", "]]", 1)
        case "no_close":
            return row[:-1]
        case "extra":
            return row + "}"
        case "cut":
            return row[: len(row) // 2]
        case "colon":
            return row.replace(":", " ", 1)
    return row


def test_a_byte_order_mark_and_crlf_are_no_rows(tmp_path: Path) -> None:
    """Case 19: BOM and CRLF."""
    assert rows_of(tmp_path, b'\xef\xbb\xbf[\r\n{"a": 1},\r\n{"a": 2}\r\n]\r\n') == [b'{"a": 1}', b'{"a": 2}']


@pytest.mark.parametrize("keep", [1, 2, 12, 21, 25])
def test_a_cut_array_says_where_it_is_cut(tmp_path: Path, keep: int) -> None:
    """Case 10: a file cut in the middle names the row and the byte, and gives no rows."""
    with pytest.raises(VlmflowError, match=r"row \d+, which begins at byte \d+, never ends"):
        rows_of(tmp_path, b'[{"a": "x"}, {"b": "y,]"}, 3]'[:keep])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"<!DOCTYPE html><html>", "neither a JSON array nor JSON lines"),
        (b"", "empty"),
        (b'[{"a": 1}] [2]', "more follows"),
        (b'[{"a": 1}, {"a": 2}] {"a": 3}]', "more follows"),
    ],
)
def test_another_file_than_an_array_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    """Case 10: an HTML page, an empty file, more than one array."""
    with pytest.raises(VlmflowError, match=said):
        rows_of(tmp_path, content)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(VlmflowError, match=r"gone\.json"):
        JsonRows(tmp_path / "gone.json")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner),
)


@given(rows=st.lists(VALUES, max_size=6), indent=st.sampled_from([None, 0, 2]), broken=st.booleans())
def test_both_ways_find_the_same_rows(tmp_path_factory, rows: list, indent: int | None, broken: bool) -> None:
    """The splitter by brackets finds what msgspec finds; a row of NaN at the end makes it do the work."""
    path = tmp_path_factory.mktemp("rows") / "raw.json"
    path.write_text(json.dumps([*rows, float("nan")] if broken else rows, indent=indent))
    with JsonRows(path) as found:
        assert [json.loads(row) for row in found][: len(rows)] == rows


@given(content=st.binary(max_size=60).map(lambda tail: b"[" + tail), size=st.integers(1, 50))
def test_any_bytes_give_rows_or_an_error(tmp_path_factory, content: bytes, size: int) -> None:
    path = tmp_path_factory.mktemp("rows") / "raw.json"
    path.write_bytes(content)
    try:
        with JsonRows(path) as rows:
            shards = [number for shard in rows.shards(size) for number in shard]
            assert shards == list(range(len(rows)))
    except VlmflowError:
        pass
