import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bulk_rows import write_volcano_rows
from vlmflow.core.errors import VlmflowError
from vlmflow.raw.json_file import JsonRows
from workflow_runs import ROOT


def rows_of(tmp_path: Path, content: bytes) -> list[bytes]:
    path = tmp_path / "raw.json"
    path.write_bytes(content)
    with JsonRows(path) as rows:
        assert len(rows) == len(list(rows))
        return list(rows)


def test_a_valid_array_is_split_into_its_rows(tmp_path: Path) -> None:
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
def test_a_broken_row_is_rejected_alone(tmp_path: Path, broken: bytes, left: bytes) -> None:
    """NaN, NUL, a lone surrogate, single quotes, a depth of 10,000: one row each, and no other row is lost."""
    assert rows_of(tmp_path, b'[{"x": 1}, ' + broken + b' ,{"y": "]"}]') == [b'{"x": 1}', left, b'{"y": "]"}']


@pytest.mark.parametrize("broken", [b'{"x": [2', b'{"x": {"y": 2', b'{"x": 2', b'{"x": "2'])
def test_an_unclosed_row_is_rejected_alone(tmp_path: Path, broken: bytes) -> None:
    """By its brackets it would extend to the end of the file."""
    behind = [b'{"x": %d}' % number for number in range(3, 7)]
    rows = [b'{"x": 1}', broken, *behind]
    assert rows_of(tmp_path, b"[" + b", ".join(rows) + b"]") == rows


@given(
    damages=st.dictionaries(
        st.integers(0, 9),
        st.sampled_from(["quote", "open", "close", "no_close", "extra", "cut", "colon"]),
        max_size=4,
    ),
    indent=st.sampled_from([None, 0, 2]),
)
def test_broken_rows_reject_no_valid_row(tmp_path_factory, damages: dict[int, str], indent: int | None) -> None:
    """Too many or too few quotes and brackets, in several rows of one file."""
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


WAYS = [("image", "turns"), ("turns", "image"), ("id", "turns", "image")]
STRAY = ['"x', "{", "}", "[", "]", '{"turns": [{"role": "a"', '{"image": "x, "turns": []}', "// said", "{}}"]


@given(
    ways=st.lists(st.sampled_from(WAYS), min_size=2, max_size=12),
    stray=st.dictionaries(st.integers(0, 12), st.sampled_from(STRAY), min_size=1, max_size=3),
    turns=st.integers(0, 4),
)
def test_a_broken_row_does_not_hide_rows_that_begin_differently(
    tmp_path_factory, ways: list[tuple[str, ...]], stray: dict[int, str], turns: int
) -> None:
    """Rows with another order of keys than those before the damage are found after it."""
    sound = []
    for number, keys in enumerate(ways):
        row = {"id": number, "image": f"{number}.jpg", "turns": [{"role": "a", "value": "x"}] * turns}
        sound.append(json.dumps({key: row[key] for key in keys}))
    rows = [row for number, row in enumerate(sound) for row in ([stray[number]] if number in stray else []) + [row]]
    path = tmp_path_factory.mktemp("rows") / "raw.json"
    path.write_text("[" + ", ".join(rows) + "]")
    with JsonRows(path) as found:
        assert [row.decode() for row in found] == rows


def test_a_thousand_rows_after_a_broken_one_are_found(tmp_path: Path) -> None:
    """Every way to begin a row is learned; an object inside rows is not one, because it would split broken rows."""
    turns = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}] * 2
    first = [json.dumps({"id": n, "conversations": turns}) for n in range(1000)]
    then = [json.dumps({"conversations": turns, "id": n}) for n in range(1000)]
    broken = [first[0][:-4], first[1].replace('"q"', '"q', 1), first[2] + "]", then[0][: len(then[0]) // 2]]
    rows = [*first, broken[0], *then, *broken[1:], *first]
    assert rows_of(tmp_path, ("[" + ",".join(rows) + "]").encode()) == [row.encode() for row in rows]


@pytest.mark.parametrize(
    "piece", [b',{"a":[', b',{"a":"', b'{"a":[{"a":1},{"a":1},' + b"1," * 500, b',{"', b",   ", b"[{},"]
)
def test_a_hostile_array_takes_time_in_proportion_to_its_size(tmp_path: Path, piece: bytes) -> None:
    """Eight times the bytes take about eight times as long: no place makes the reader start again."""
    seconds = []
    for size in (10_000, 80_000):
        begun = time.process_time()
        rows_of(tmp_path, b"[" + piece * (size // len(piece)) + b"]")
        seconds.append(time.process_time() - begun)
    assert seconds[1] < 24 * seconds[0] + 0.2


@pytest.mark.parametrize("end", [b",]", b" , ]\n", b",\r\n\t]"])
def test_a_comma_after_the_last_row_is_not_a_row(tmp_path: Path, end: bytes) -> None:
    assert rows_of(tmp_path, b'[{"a": 1}, {"b": 2}' + end) == [b'{"a": 1}', b'{"b": 2}']


@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl"])
def test_a_blank_line_is_not_a_row(tmp_path: Path, name: str) -> None:
    """A hundred thousand blanks on one line, and at the end of the file, are read only once."""
    path = tmp_path / name
    blank = b" " * 100_000
    path.write_bytes(b'{"a": 1}\n\n  \n \t\r\n' + blank + b'\n  {"b": 2}\r\n' + blank)
    with JsonRows(path) as rows:
        assert list(rows) == [b'{"a": 1}', b'{"b": 2}']


def test_a_byte_order_mark_and_crlf_are_not_rows(tmp_path: Path) -> None:
    """BOM and CRLF."""
    assert rows_of(tmp_path, b'\xef\xbb\xbf[\r\n{"a": 1},\r\n{"a": 2}\r\n]\r\n') == [b'{"a": 1}', b'{"a": 2}']


def named_rows(path: Path, content: bytes) -> list[bytes]:
    path.write_bytes(content)
    with JsonRows(path) as rows:
        return list(rows)


@pytest.mark.parametrize(
    "content",
    [b'[{"a": 1}, {"b": 2}]\n', b'\xef\xbb\xbf[\n  {"a": 1},\n  {"b": 2}\n]', b'\n [{"a": 1},\r\n{"b": 2}]\r\n'],
)
def test_an_array_may_be_called_jsonl(tmp_path: Path, content: bytes) -> None:
    assert named_rows(tmp_path / "rows.jsonl", content) == [b'{"a": 1}', b'{"b": 2}']
    broken = content.replace(b"1", b"NaN")
    assert named_rows(tmp_path / "rows.jsonl", broken) == [b'{"a": NaN}', b'{"b": 2}']


@pytest.mark.parametrize(
    "content", [b'[{"a": 1}]\n[{"b": 2}]\n', b'["a"]\n["b"]', b'[{"a": 1}, \n{"b": 2}\n', b"[1]", b"[\n]"]
)
def test_other_brackets_in_jsonl_are_lines(tmp_path: Path, content: bytes) -> None:
    """Rows that are lists, and a first line that is broken: each line is rejected alone."""
    lines = [line for line in content.splitlines() if line]
    assert [row.strip() for row in named_rows(tmp_path / "rows.jsonl", content)] == [line.strip() for line in lines]


@given(rows=st.lists(st.integers(0, 3), min_size=1, max_size=6), indent=st.integers(1, 4), name=st.booleans())
def test_objects_over_lines_are_rows(tmp_path_factory, rows: list[int], indent: int, name: bool) -> None:
    """As json.dump and jq write them, one behind the other; a comma may be between two."""
    path = tmp_path_factory.mktemp("rows") / ("raw.jsonl" if name else "raw.json")
    texts = [json.dumps({"a": [{"b": "}\n{", "c": {}}] * number, "d": 1}, indent=indent) for number in rows]
    for between in ("\n", "\r\n\r\n", "", ",\n"):
        assert named_rows(path, between.join(texts).encode()) == [text.encode() for text in texts]


@pytest.mark.parametrize("damage", ["quote", "open", "no_close", "cut", "colon"])
@pytest.mark.parametrize("broken", [0, 2, 4])
def test_a_broken_object_over_lines_is_rejected_alone(tmp_path: Path, damage: str, broken: int) -> None:
    """Also the first and the last one."""
    rows = [json.dumps({"image": f"{number}.jpg", "turns": [{"value": "x ["}]}, indent=2) for number in range(5)]
    rows[broken] = damaged(rows[broken], damage)
    found = named_rows(tmp_path / "rows.jsonl", "\n".join(rows).encode())
    assert found == [row.strip().encode() for row in rows]


@pytest.mark.lengthy
def test_a_row_of_several_lines_may_be_long(tmp_path: Path) -> None:
    rows = [b'{\n "a": "%s"\n}' % (b"x" * size) for size in (10, 20_000_000, 30)]
    assert named_rows(tmp_path / "rows.json", b"\n".join(rows)) == rows


def test_broken_objects_over_lines_take_time_in_proportion_to_their_size(tmp_path: Path) -> None:
    for piece in (b'{\n"a":[', b'{\n"a":"', b'{\n"a":[1,1,1,1\n,', b"{\n"):
        seconds = []
        for size in (10_000, 80_000):
            begun = time.process_time()
            assert named_rows(tmp_path / "rows.json", piece * (size // len(piece)))
            seconds.append(time.process_time() - begun)
        assert seconds[1] < 24 * seconds[0] + 0.2


@pytest.mark.parametrize(
    "content",
    [
        b'{"data": [{"a": 1}, {"b": 2}]}',
        b'{"version": 1, "name": "x: [{", "rows": [{"a": 1},\n{"b": 2}]}\n',
        b'\xef\xbb\xbf{\n  "train": [\n    {"a": 1},\n    {"b": 2}\n  ]\n}\n',
        b'{"examples":[{"a": 1}\n,{"b": 2}\n]\n}',
    ],
)
@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl"])
def test_rows_may_be_a_list_in_an_object(tmp_path: Path, content: bytes, name: str) -> None:
    assert named_rows(tmp_path / name, content) == [b'{"a": 1}', b'{"b": 2}']


@pytest.mark.parametrize("content", [b'{"data": [{"a": 1}]}\n{"data": [{"a": 2}]}\n', b'{"turns": [{"a": 1}]}'])
@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl"])
def test_a_row_may_hold_a_list(tmp_path: Path, content: bytes, name: str) -> None:
    """On a line of its own, with others behind it, or under another key."""
    assert named_rows(tmp_path / name, content) == content.splitlines()


@pytest.mark.parametrize("keep", [1, 2, 12, 21, 25])
def test_a_cut_array_is_refused_with_the_place(tmp_path: Path, keep: int) -> None:
    """A file cut in the middle names the row and the byte, and gives no rows."""
    with pytest.raises(VlmflowError, match=r"row \d+, which begins at byte \d+, has no end"):
        rows_of(tmp_path, b'[{"a": "x"}, {"b": "y,]"}, 3]'[:keep])


READ_CUT = """
import re, resource, sys
from pathlib import Path
from vlmflow.raw.json_file import JsonRows
has = int(re.search(r"VmData:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (has + 20_000_000, -1))
try:
    JsonRows(Path(sys.argv[1]))
except Exception as error:
    print(error)
print(resource.getrusage(resource.RUSAGE_SELF).ru_utime)
"""


@pytest.mark.parametrize("last", ["a row", "a string of 20 MB"])
def test_a_large_cut_array_is_reported_in_bounded_memory(tmp_path: Path, last: str) -> None:
    """Names the row and its byte in 60 MB of Volcano's form, in 20 MB of memory and 5 s of one core."""
    write_volcano_rows(tmp_path / "some.json", 2_000, seed=1)
    rows = (tmp_path / "some.json").read_bytes()[2:-3]
    times = 22 if last == "a row" else 14
    content = b"[\n" + (rows + b",\n") * times
    begin, number = len(content), 2_000 * times
    content += b'{"id": "x", "conversations": [{"from": "human", "value": "'
    content += b"an open string, [{" * (1 if last == "a row" else 20_000_000 // 18)
    (tmp_path / "cut.json").write_bytes(content)
    assert 55_000_000 < len(content) < 75_000_000
    done = subprocess.run(
        [sys.executable, "-c", READ_CUT, tmp_path / "cut.json"],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": str(ROOT / "scripts")},
    )
    said, *_, seconds = done.stdout.splitlines()
    where = f"row {number}, which begins at byte {begin}, has no end: the file is cut at byte {len(content)}"
    assert f"cut.json: {where}" in said
    assert float(seconds) < 5


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"<!DOCTYPE html><html>", "neither a JSON array nor JSON lines"),
        (b"hello", r"give a JSON array or JSON lines \(.json, .jsonl\), a table .* \(.csv, .tsv with tabs\)"),
        (b"", "the file is empty"),
        (b'[{"a": 1}] [2]', "more text follows"),
        (b'[{"a": 1}, {"a": 2}] {"a": 3}]', "more text follows"),
    ],
)
def test_another_file_than_an_array_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    """An HTML page, an empty file, more than one array."""
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
    """The splitter by brackets finds the same rows as msgspec; a row with NaN at the end makes it run."""
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
