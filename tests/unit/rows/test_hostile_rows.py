"""Hostile raw files, for every reader: an unreadable row is rejected alone, with a reason."""

import csv
import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any
from zlib import crc32

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from made_rows import form_rows
from vlmflow.config.data_settings import DatasetSettings, RowChoice, RowLimits
from vlmflow.config.raw_forms import form_of
from vlmflow.core.errors import VlmflowError
from vlmflow.pictures.resolve import named_paths
from vlmflow.raw.choice import left_out, refuse_columns
from vlmflow.raw.csv_file import _CountedLines
from vlmflow.raw.split import open_rows
from vlmflow.rows.chat import REASONS
from vlmflow.rows.convert import convert
from vlmflow.rows.row_check import CheckedRows, Grouping
from workflow_runs import ROOT

GOOD = [{"prompt": f"q{n}", "completion": f"a{n}"} for n in range(3)]


def outcome(path: Path, kind: str = "prompt_completion", processes: int = 1) -> dict[int, str]:
    """Convert and check a file of texts; return by row number "" for a usable row, else the reason."""
    good, bad = path.with_name("converted"), path.with_name("rejects")
    with open_rows([path], "train") as rows:
        refuse_columns(rows, kind, "text", {})
        convert(rows, good, bad, "train", form_rows(kind, "text", {}, "p", None), RowChoice(), processes)
        count = len(rows)
    found = {row["raw_row"]: row["reason"] for row in map(json.loads, bad.read_bytes().splitlines())}
    with TemporaryFile() as spool:
        for verdict in CheckedRows(spool, good, count, Grouping(None, "text"), RowLimits(), processes):
            assert verdict.raw_row not in found
            found[verdict.raw_row] = verdict.reject.reason if verdict.reject else ""
    assert sorted(found) == list(range(count))
    assert set(found.values()) <= {"", *REASONS}
    return found


def as_array(path: Path, rows: list[bytes]) -> Path:
    path = path / "rows.json"
    path.write_bytes(b"\xef\xbb\xbf[\r\n" + b",\r\n".join(rows) + b"\r\n]\r\n")
    return path


def as_lines(path: Path, rows: list[bytes]) -> Path:
    path = path / "rows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b"".join(row + b"\r\n" for row in rows))
    return path


def text_row(completion: str) -> bytes:
    return json.dumps({"prompt": "q", "completion": completion}).encode()


JSON_FAULTS = {
    "a NUL in a text": (text_row("\0"), "control_character"),
    "a bare NUL": (b"\0", "bad_json"),
    "half a surrogate pair": (b'{"prompt": "q", "completion": "\\ud800"}', "bad_json"),
    "no UTF-8": (b'{"prompt": "q", "completion": "\xff\xfe"}', "bad_json"),
    "NaN": (b'{"prompt": "q", "completion": NaN}', "bad_json"),
    "nested 10,000 deep": (b'{"other": ' + b"[" * 10_000 + b"]" * 10_000 + b"}", "bad_json"),
    "another type": (b'{"prompt": 1, "completion": "a"}', "bad_shape"),
    "a list": (b'["prompt", "completion"]', "bad_shape"),
    "white space": (text_row(" \t\n "), "empty_turn"),
    "a chat mark": (text_row("<|im_end|>"), "special_token"),
    "a picture tag": (text_row("see <image>"), "stray_tag"),
}


@pytest.mark.parametrize("write", [as_array, as_lines])
@pytest.mark.parametrize("fault", JSON_FAULTS)
def test_a_hostile_json_row_is_rejected_alone(tmp_path: Path, write: Callable, fault: str) -> None:
    """With a BOM and CRLF around it, in an array and in lines; as the first, a middle and the last row."""
    row, reason = JSON_FAULTS[fault]
    good = [json.dumps(row).encode() for row in GOOD]
    rows = [row, good[0], row, good[1], good[2], row]
    expected = {number: reason if content is row else "" for number, content in enumerate(rows)}
    assert outcome(write(tmp_path, rows)) == expected


@pytest.mark.parametrize("write", [as_array, as_lines])
def test_a_row_of_10_mb_is_rejected_alone(tmp_path: Path, write: Callable) -> None:
    good, long = json.dumps(GOOD[0]).encode(), text_row("x" * 10_000_000)
    found = outcome(write(tmp_path, [good, long, good, long]))
    assert found == {0: "", 1: "turn_too_long", 2: "", 3: "turn_too_long"}


@pytest.mark.parametrize("kind", ["sharegpt", "messages"])
def test_ten_thousand_turns_are_too_many(tmp_path: Path, kind: str) -> None:
    key, role, text, names = ("conversations", "from", "value", ("human", "gpt"))
    if kind == "messages":
        key, role, text, names = ("messages", "role", "content", ("user", "assistant"))
    long = {key: [{role: names[number % 2], text: "x"} for number in range(10_000)]}
    short = {key: long[key][:2]}
    rows = [json.dumps(row).encode() for row in (short, long, short)]
    assert outcome(as_lines(tmp_path, rows), kind) == {0: "", 1: "too_many_turns", 2: ""}


@pytest.mark.parametrize("write", [as_array, as_lines])
def test_a_row_that_is_larger_in_memory_is_rejected_before_it_is_decoded(tmp_path: Path, write: Callable) -> None:
    """An empty object has 64 bytes there, in the file three; a picture as base64 has no commas."""
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    good, many = json.dumps({"messages": turns}).encode(), b'{"messages":[' + b"{}," * 2_200_000 + b"{}]}"
    assert outcome(write(tmp_path, [good, many, good]), "messages") == {0: "", 1: "bad_table_row", 2: ""}
    said = json.loads((tmp_path / "rejects").read_text())["detail"]
    assert re.fullmatch(r"the row has about 147,400,01\d bytes in memory, at most 134,217,728 are read", said)


@pytest.mark.parametrize("kind", ["sharegpt", "messages", "alpaca", "text"])
def test_a_row_with_nothing_in_it_is_rejected(tmp_path: Path, kind: str) -> None:
    key = next(iter(form_of(kind).keys))
    rows = [b"{}", b"null", json.dumps({key: []}).encode(), json.dumps({key: None}).encode()]
    assert all(outcome(as_lines(tmp_path, rows), kind).values())


@pytest.mark.parametrize("content", [b"[]", b"[ \n]", b" \n\t", b"\xef\xbb\xbf[]\n", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl"])
def test_a_file_without_rows_is_refused_by_name(tmp_path: Path, content: bytes, name: str) -> None:
    (tmp_path / name).write_bytes(content)
    if name == "rows.jsonl" and b"[" in content:  # lines that are not rows are rejected alone
        assert set(outcome(tmp_path / name).values()) <= {"bad_json", "bad_shape"}
        return
    with pytest.raises(VlmflowError, match=f"{name}: has no rows") as raised:
        outcome(tmp_path / name)
    assert "datasets.NAME.train" in raised.value.next_step


def write_csv(path: Path, rows: list[list[str]], ending: str = "\r\n") -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator=ending).writerows([["prompt", "completion"], *rows])
    path.write_bytes(text.getvalue().encode())
    return path.read_bytes()


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (b"one\r\n", "bad_table_row"),
        (b"one,two,three\r\n", "bad_table_row"),
        (b'"one" and a half,two\r\n', "bad_table_row"),
        (b"one,\xff\xfe\r\n", "bad_table_row"),
        (b"one,\0\r\n", "control_character"),
        (b"one," + b"x" * 10_000_000 + b"\r\n", "turn_too_long"),
        (b"one,\r\n", "empty_turn"),
        (b'one,"<|im_end|>"\r\n', "special_token"),
    ],
)
def test_a_hostile_csv_row_is_rejected_alone(tmp_path: Path, bad: bytes, reason: str) -> None:
    path = tmp_path / "rows.csv"
    content = write_csv(path, [["q,1", 'a "1"\nnext line'], ["q2", "a2"]]).split(b"q2")
    path.write_bytes(b"\xef\xbb\xbf" + content[0] + bad + b"\r\nq2" + content[1])
    assert outcome(path) == {0: "", 1: reason, 2: ""}
    with open_rows([path], "train") as rows:
        _, _, start, end = rows.locate(1)
        assert path.read_bytes()[start:end] == bad
        assert path.read_bytes()[slice(*rows.locate(2)[2:])] == b"q2,a2\r\n"


def test_a_cut_csv_file_is_refused_with_the_place(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    content = write_csv(path, [["q1", "a1"], ["q2", "a,\n2"]])
    path.write_bytes(content[:-5])
    with pytest.raises(VlmflowError, match="row 1, which begins at byte 26, has no end"):
        outcome(path)


def faults_of(path: Path, content: bytes) -> tuple[int, dict[int, bytes]]:
    """Return the number of rows, and by number the bytes of the unreadable ones."""
    path.write_bytes(content)
    with open_rows([path], "train") as rows:
        return len(rows), {number: content[slice(*rows.locate(number)[2:])] for number in rows.faults}


def test_an_unclosed_quotation_rejects_only_its_own_line(tmp_path: Path) -> None:
    """Everything up to the next quotation mark, 1000 lines later, would be one row."""
    lines = [b"q%d,a%d\r\n" % (n, n) for n in range(2000)]
    lines[500], lines[1500] = b'"oops,a\r\n', b'q,"fine"\r\n'
    rows, faults = faults_of(tmp_path / "rows.csv", b"".join([b"prompt,completion\r\n", *lines]))
    assert rows == 2000
    assert faults == {500: lines[500]}


@pytest.mark.parametrize("swallowed", [0, 1, 2])
def test_quotation_marks_in_texts_between_tabs_hold_no_other_rows(tmp_path: Path, swallowed: int) -> None:
    """Programs that write tabs often quote nothing. A quoted text of several lines is one, also there."""
    lines = [b'q1\t"Hello\n', *(b"q2\ta2\n",) * swallowed, b'q3\tworld"\n', b'q4\t"of two\nlines"\n', b"q5\ta5\n"]
    rows, faults = faults_of(tmp_path / "rows.tsv", b"".join([b"prompt\tcompletion\n", *lines]))
    assert faults == {0: lines[0]}
    assert rows == len(lines)
    with open_rows([tmp_path / "rows.tsv"], "train") as found:
        assert found.faults[0] == f"a quotation mark holds {2 + swallowed} lines, each with 2 fields"
        assert json.loads(found[1 + swallowed])["completion"] == 'world"'
        assert json.loads(found[2 + swallowed])["completion"] == "of two\nlines"


@pytest.mark.parametrize("bad", [b'"oops,a\n', b'q,"oops\n', b'"a\nb,"\n', b'x,y,"a\nb"\n', b'"a"b,"c\n'])
@pytest.mark.parametrize("last", [b'q,"fine"\n', b"q,fine\n", b'"two\nlines","fine"\n'])
def test_a_broken_quotation_rejects_no_valid_row(tmp_path: Path, bad: bytes, last: bytes) -> None:
    good = [b"q%d,a%d\n" % (n, n) for n in range(9)]
    content = b"".join([b"prompt,completion\n", *good[:4], bad, *good[4:], last])
    if b'"' not in last and bad.count(b'"') == 1:
        with pytest.raises(VlmflowError, match="row 4, which begins at byte 42, has no end"):
            faults_of(tmp_path / "rows.csv", content)
        return
    rows, faults = faults_of(tmp_path / "rows.csv", content)
    assert rows - len(faults) == 10
    assert b"".join(faults.values()) == bad


def test_an_open_quotation_is_followed_so_far_and_no_further(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two stray marks far apart would keep all between them in memory; each rejects its own line, with a reason."""
    monkeypatch.setattr("vlmflow.raw.csv_file.LONGEST_RECORD", 20_000)
    lines = [b"q%d,a%d\n" % (n, n) for n in range(20_000)]
    long = b'q,"' + b"long\n" * 3_000 + b'"\n'
    lines[100], lines[9_000], lines[15_000], lines[-1] = b'q,"oops\n', long, b'"oops",a"\n', b'q,"fine"\n'
    path, held = tmp_path / "rows.csv", []
    give_back = _CountedLines.give_back
    monkeypatch.setattr(_CountedLines, "give_back", lambda self: (held.append(len(self.record)), give_back(self)))
    rows, faults = faults_of(path, b"".join([b"prompt,completion\n", *lines]))
    assert rows == 20_000
    assert faults == {100: lines[100]}
    assert 1_000 < held[0] < 2_500
    with open_rows([path], "train") as found:
        assert found.faults == {100: "a quotation is not closed within 20,000 bytes"}
        assert len(json.loads(found[9_000])["completion"]) == 15_000


@given(content=st.lists(st.sampled_from([b'"', b'""', b",", b"a", b"\n", b"\r\n"]), max_size=60).map(b"".join))
def test_every_csv_line_is_in_one_row(tmp_path_factory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("csv") / "rows.csv"
    path.write_bytes(b"a,b\n" + content)
    with suppress(VlmflowError), open_rows([path], "train") as rows:
        places = [rows.locate(number)[2:] for number in range(len(rows))]
        ends = [4, *(end for _, end in places)]
        for end, (start, _) in zip(ends, places, strict=False):
            assert path.read_bytes()[end:start].strip(b"\r\n") == b""
        assert path.read_bytes()[ends[-1] :].strip(b"\r\n") == b""


@pytest.mark.parametrize("suffix", [".CSV", ".Parquet", ".JSONL"])
def test_column_names_match_in_any_letter_case(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"rows{suffix}"
    match suffix:
        case ".CSV":
            write_csv(path, [list(row.values()) for row in GOOD])
        case ".Parquet":
            pq.write_table(pa.Table.from_pylist(GOOD), path)
        case _:
            path.write_text("[\n" + "".join(json.dumps(row) + "\n" for row in GOOD[1:]))
    assert len(outcome(path)) == 3


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("größe,completion\r\nx,y\r\n".encode("latin-1"), "is not UTF-8"),
        ("prompt,completion\r\nx,y\r\n".encode("utf-16"), "is in UTF-16"),
        (b"", "must give every column a name"),
        (b"prompt,prompt\r\nx,y\r\n", "must give every column a name"),
        (b"prompt,completion\r\n", "has no rows"),
        (b"id;prompt;completion\r\n1;x;y\r\n", "one field with semicolons; the separator of .csv is commas"),
        (b"question,answer\r\nx,y\r\n", "no column 'prompt'; the columns are question, answer"),
    ],
)
def test_a_csv_file_of_another_kind_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "rows.csv").write_bytes(content)
    with pytest.raises(VlmflowError, match=said):
        outcome(tmp_path / "rows.csv")


@pytest.mark.parametrize("first", [b"sep=,\r\n", b"\xef\xbb\xbfsep=,\n", b'"sep=,"\r\n'])
def test_a_first_line_that_names_the_separator_is_no_header(tmp_path: Path, first: bytes) -> None:
    """Excel reads it, and what people export for Excel has it."""
    table = b"prompt,completion\r\nq,a\r\n"
    (tmp_path / "rows.csv").write_bytes(first + table)
    with open_rows([tmp_path / "rows.csv"], "train") as rows:
        assert [json.loads(row) for row in rows] == [{"prompt": "q", "completion": "a"}]
        assert rows.locate(0)[2:] == (len(first) + 19, len(first + table)), "bytes of the file itself"
    (tmp_path / "rows.csv").write_bytes(b"sep=;\r\nprompt;completion\r\nq;a\r\n")
    with pytest.raises(VlmflowError, match=r"one field with semicolons; the separator of \.csv is commas"):
        outcome(tmp_path / "rows.csv")


@pytest.mark.parametrize("kind", ["volcano", "sharegpt", "messages"])
def test_turns_that_are_numbers_are_refused_once(tmp_path: Path, kind: str) -> None:
    """One error says what to do, instead of a reject per row. Texts may be JSON, so each row is read."""
    key = next(iter(form_of(kind).keys))
    pq.write_table(pa.table({key: [1, 2]}), tmp_path / "rows.parquet")
    with pytest.raises(VlmflowError, match=f"column '{key}' holds int64, not a list of turns") as refused:
        outcome(tmp_path / "rows.parquet", kind)
    assert "save the rows as JSON lines" in refused.value.next_step
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        csv.writer(file).writerows([[key], ['[{"from": "human"']])
    assert outcome(tmp_path / "rows.csv", kind) == {0: "bad_shape"}


def test_a_text_under_images_is_one_path_or_a_list(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text('prompt,completion,images\nq,a,x/1.jpg\nr,b,"[""x/1.jpg"", ""x/2.jpg""]"\n')
    assert named_paths([tmp_path / "rows.csv"], "train") == {"x/1.jpg": 2, "x/2.jpg": 1}
    with open_rows([tmp_path / "rows.csv"], "train") as rows:
        for columns in ({}, {"image": "images"}):
            refuse_columns(rows, "prompt_completion", "image", columns)
        with pytest.raises(VlmflowError, match="no column 'image'"):
            refuse_columns(rows, "prompt_completion", "image", {"images": "image"})


def test_an_empty_column_that_may_be_missing_is_taken(tmp_path: Path) -> None:
    none = pa.array([None], pa.null())
    table = pa.table({"instruction": ["q"], "output": ["a"], "input": none, "image": none, "images": none})
    pq.write_table(table, tmp_path / "rows.parquet")
    assert outcome(tmp_path / "rows.parquet", "alpaca") == {0: ""}


CELLS = st.text(st.characters(codec="utf-8", exclude_characters="\r"), min_size=1, max_size=12)


@given(cells=st.lists(st.tuples(CELLS, CELLS), min_size=1, max_size=8), ending=st.sampled_from(["\n", "\r\n"]))
def test_every_csv_cell_is_read_as_it_was_written(tmp_path_factory, cells: list, ending: str) -> None:
    path = tmp_path_factory.mktemp("csv") / "rows.csv"
    write_csv(path, [list(pair) for pair in cells], ending)
    with open_rows([path], "train") as rows:
        assert [tuple(json.loads(row).values()) for row in rows] == cells


@given(content=st.binary(max_size=80), suffix=st.sampled_from([".csv", ".tsv", ".jsonl", ".json", ".parquet"]))
def test_any_bytes_give_rows_or_an_error(tmp_path_factory, content: bytes, suffix: str) -> None:
    path = tmp_path_factory.mktemp("any") / f"rows{suffix}"
    path.write_bytes(content)
    with suppress(VlmflowError):
        outcome(path)


def test_hostile_parquet_cells_cost_their_rows(tmp_path: Path) -> None:
    long = "x" * 10_000_000
    texts = [b"fine", b"\xff", b"\0", None, long.encode(), b"fine"]
    column = pa.Array.from_buffers(pa.string(), len(texts), pa.array(texts, pa.binary()).buffers())
    pq.write_table(pa.table({"prompt": ["q"] * 6, "completion": column}), tmp_path / "rows.parquet")
    reasons = ["", "bad_table_row", "control_character", "bad_shape", "turn_too_long", ""]
    assert outcome(tmp_path / "rows.parquet") == dict(enumerate(reasons))


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"prompt": pa.array([], pa.string()), "completion": pa.array([], pa.string())}, "the table has no rows"),
        ({"question": ["x"], "completion": ["y"]}, "no column 'prompt'; the columns are question, completion"),
        ({"prompt": [1], "completion": ["y"]}, "column 'prompt' holds int64, not a text"),
        ({"prompt": [b"x"], "completion": ["y"]}, "column 'prompt' holds bytes, not a text"),
        ({"prompt": pa.array([None]), "completion": ["y"]}, "column 'prompt' holds null, not a text"),
        ({"prompt": ["x"], "completion": ["y"], "image": [1]}, "column 'image' holds int64, not a picture"),
    ],
)
def test_a_parquet_file_of_another_kind_is_refused(tmp_path: Path, table: dict[str, Any], said: str) -> None:
    pq.write_table(pa.table(table), tmp_path / "rows.parquet")
    with pytest.raises(VlmflowError, match=said):
        outcome(tmp_path / "rows.parquet")


@pytest.mark.parametrize(
    "column",
    [
        pa.array([0, 1, 2], pa.timestamp("ns")),
        pa.array([10**18, 0, 1], pa.timestamp("us")),
        pa.array([10**9, 0, 1], pa.date32()),
        pa.array([0, 1, 2], pa.timestamp("us", "Mars/Phobos")),
    ],
    ids=lambda column: str(column.type),
)
def test_a_column_that_is_not_needed_is_not_read(tmp_path: Path, column: pa.Array) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(GOOD).append_column("made", column), path)
    with open_rows([path], "train", columns=["prompt", "completion", "image"]) as rows:
        assert [json.loads(row) for row in rows] == GOOD
        assert not rows.faults
    with open_rows([path], "train", columns=["prompt", "made"]) as rows:
        assert len(rows) == 3
        assert [number for number, row in enumerate(rows) if row == b"null"] == sorted(rows.faults)
    with open_rows([path], "train", columns=["other"]) as rows:
        assert list(rows) == [b"{}"] * 3
    kind = DatasetSettings(kind="alpaca", train="x.parquet", columns={"input": "given"})
    read = ["instruction", "given", "output", "system", "history", "image", "images", "source"]
    assert kind.read_columns[: len(read)] == read
    assert {"system_prompt", "label"} <= set(kind.read_columns[len(read) :])  # keys that change what a row means
    assert not {"made", "input"} & set(kind.read_columns)
    assert kind.choice("train").read_columns == kind.read_columns


def test_a_parquet_file_that_is_cut_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(GOOD), path)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(VlmflowError, match=r"rows\.parquet"):
        outcome(path)


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".csv", ".parquet"])
def test_the_bytes_do_not_depend_on_the_number_of_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    monkeypatch.setattr("vlmflow.rows.convert.SHARD_BYTES", 2_000)
    rows = [{"prompt": f"question {n}", "completion": f"answer {n}" if n % 7 else ""} for n in range(500)]
    path = tmp_path / f"rows{suffix}"
    match suffix:
        case ".csv":
            write_csv(path, [list(row.values()) for row in rows])
        case ".parquet":
            pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=90)
        case ".json":
            path.write_text(json.dumps(rows))
        case _:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = []
    for processes in (1, 3):
        assert list(outcome(path, processes=processes).values()).count("empty_turn") == 72
        made.append([path.with_name(name).read_bytes() for name in ("converted", "rejects")])
    assert made[0] == made[1]


def test_rows_are_drawn_by_the_seed_from_those_of_the_sources(tmp_path: Path) -> None:
    rows = [{"prompt": "q", "completion": "a", "source": "ab"[n % 2]} for n in range(100)]
    path = as_lines(tmp_path, [json.dumps(row).encode() for row in rows] + [b"broken"])
    with open_rows([path], "train") as found:

        def drawn(**choice: Any) -> list[int]:
            reason = left_out(found, RowChoice(**choice))
            return [number for number in range(len(found)) if not reason(number)]

        assert drawn() == list(range(101))
        assert drawn(sources=["a"]) == [*range(0, 100, 2), 100]
        first = drawn(sources=["a"], samples=10, seed=1)
        assert len(first) == 10
        assert set(first) <= {*range(0, 100, 2), 100}
        assert first == drawn(sources=["a"], samples=10, seed=1) != drawn(sources=["a"], samples=10, seed=2)
        assert drawn(samples=1000) == list(range(101))
        assert drawn(sources=["q"], names={"source": "prompt"}) == list(range(101))
        assert drawn(sources=["a"], names={"source": "prompt"}) == [100]


@pytest.mark.parametrize("source", [None, 1, 1.0, True, ["a"], {"a": 1}, "", "b"])
def test_a_row_without_a_text_as_source_is_of_no_chosen_source(tmp_path: Path, source: Any) -> None:
    """A row that is not a JSON object is used, and rejected with its own reason."""
    rows = [{"prompt": "q", "completion": "a", "source": name} for name in ("a", source, "a")]
    path = as_lines(tmp_path, [json.dumps(row).encode() for row in rows] + [b"broken", b'["a"]', b"{}"])
    with open_rows([path], "train") as found:
        reason = left_out(found, RowChoice(sources=["a", "1", "None"]))
        assert [reason(number) for number in range(6)] == ["", "source_left_out", "", "", "", "source_left_out"]


def test_an_integer_column_of_sources_holds_no_chosen_source(tmp_path: Path) -> None:
    table = pa.table({"prompt": ["q"] * 3, "completion": ["a"] * 3, "source": pa.array([1, None, 2])})
    pq.write_table(table, tmp_path / "rows.parquet")
    with open_rows([tmp_path / "rows.parquet"], "train") as found:
        reason = left_out(found, RowChoice(sources=["1"]))
        assert {reason(number) for number in range(3)} == {"source_left_out"}


LINE = {"split": "train", "row": 0, "file": "x/rows.jsonl", "checksum": f"{crc32(b'{}'):08x}", "raw": {}}


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([LINE | {"row": 9}], r"line 1: row 9 \(counted from 0\) of x/rows.jsonl is not in"),
        ([LINE | {"row": -1}], r"line 1: row -1 \(counted from 0\) of x/rows.jsonl is not in"),
        ([LINE | {"file": "other.jsonl"}], "line 1: it fixes other.jsonl, .* the quarantine of another data set"),
        ([LINE, LINE | {"row": 1}], "line 2: row 1 of x/rows.jsonl has changed"),
        ([LINE, LINE], "line 2: row 0 of the train split is already in line 1"),
        ([LINE | {"split": "trian"}], r"line 1: Invalid enum value 'trian' - at `\$.split`"),
        ([{key: LINE[key] for key in ("split", "file", "checksum", "raw")}], "missing required field `row`"),
        ([{key: LINE[key] for key in ("split", "row", "file", "raw")}], "missing required field `checksum`"),
        (["", LINE], "line 1: is empty"),
        ([], "has no rows"),
        (["{"], "line 1: Input data was truncated"),
    ],
)
def test_fixed_rows_that_are_not_in_the_file_are_refused(tmp_path: Path, lines: list[Any], said: str) -> None:
    path = as_lines(tmp_path, [b"{}", b'{"b": 2}'])
    text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    (tmp_path / "fixed.jsonl").write_text("\n".join([*text, ""]))
    with pytest.raises(VlmflowError, match=said):
        open_rows([path], "train", [tmp_path / "fixed.jsonl"])


def test_fixed_rows_replace_the_raw_rows(tmp_path: Path) -> None:
    """In the quarantine, a row that was not JSON is a text; one that was too large is null, and remains rejected."""
    raw = [b"{}", b"{bad", b'{"c": 3}', b'{"d": 4}']
    path = as_lines(tmp_path, raw)
    fixed = [(0, {"a": 1}, "train"), (1, '{"b": 2}', "train"), (2, None, "train"), (3, {}, "test")]
    lines = [
        LINE | {"split": split, "row": row, "checksum": f"{crc32(raw[row]):08x}", "raw": made}
        for row, made, split in fixed
    ]
    (tmp_path / "fixed.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + "\n\n")
    with open_rows([path], "train", [tmp_path / "fixed.jsonl"]) as rows:
        assert list(rows) == [b'{"a": 1}', b'{"b": 2}', b'{"c": 3}', b'{"d": 4}']
        assert [rows.checksum(number) for number in range(4)] == [f"{crc32(row):08x}" for row in raw]


FULL_DISK = """
import resource, sys
from pathlib import Path
from vlmflow.pictures.resolve import named_paths
from vlmflow.raw.split import open_rows
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
open_rows([Path(sys.argv[1])], "train")
"""


def test_a_table_that_does_not_fit_on_the_temporary_disk_is_reported(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": ["q" * 100] * 1000, "completion": ["a"] * 1000}), tmp_path / "rows.parquet")
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path / "rows.parquet")],
        capture_output=True,
        text=True,
        check=False,
        env={"TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT / "scripts")},
    )
    assert done.returncode == 1
    assert f"rows.parquet: its rows do not fit in {tmp_path}: File too large" in done.stderr
    assert "set TMPDIR to a folder on a larger disk" in done.stderr
