"""Fixed rows: edited in the quarantine's form, one after the other."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from made_rows import form_rows, split_rules
from vlmflow.config.data_settings import RowChoice
from vlmflow.raw.split import open_rows
from vlmflow.rows.convert import convert
from vlmflow.rows.stats import RowStats
from vlmflow.rows.validate import SplitFiles, validate

Row = dict[str, Any]


def quarantine(raw: Path, fixed: list[Path] = []) -> tuple[list[Row], RowStats]:  # noqa: B006
    """Convert and validate one file of prompts and completions; return the rejected rows and the account."""
    folder = raw.parent / f"data{len(fixed)}"
    folder.mkdir(exist_ok=True)
    files = SplitFiles("train", [raw], folder / "converted", folder / "rejects")
    make = form_rows("prompt_completion", "text", {}, None, None)
    with open_rows([raw], "train", fixed) as rows:
        convert(rows, files.converted, files.rejects, "train", make, RowChoice(), 1)
    rules = split_rules(0.1, 1, 1.0, modality="text")
    stats = validate([files], folder, rules, 1, fixed)
    return [json.loads(line) for line in (folder / "quarantine.jsonl").read_bytes().splitlines()], stats


def write_lines(path: Path, rows: list[Row]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def table(folder: Path, bad: dict[int, str]) -> Path:
    """Write a CSV file of 20 rows, some of them replaced by other lines."""
    path = folder / "rows.csv"
    lines = [bad.get(n, f"q{n},a{n}\n").encode("utf-8", "surrogateescape") for n in range(20)]
    path.write_bytes(b"prompt,completion\n" + b"".join(lines))
    return path


def texts(folder: Path) -> str:
    return "".join((folder / f"{name}.jsonl").read_text() for name in ("train", "val"))


def test_rows_are_fixed_one_after_the_other(tmp_path: Path) -> None:
    """Fixing the second run's quarantine does not undo the fixes of the first one."""
    raw = write_lines(
        tmp_path / "rows.jsonl", [{"prompt": f"q{n}", "completion": "a" if n > 1 else ""} for n in range(9)]
    )
    rows, _ = quarantine(raw)
    assert [row["row"] for row in rows] == [0, 1]
    rows[0]["raw"]["completion"] = "first"
    first = write_lines(tmp_path / "first.jsonl", rows)
    left, stats = quarantine(raw, [first])
    assert [row["row"] for row in left] == [1]
    assert stats.mended_rows == {"train": 1}
    left[0]["raw"]["completion"] = "second"
    second = write_lines(tmp_path / "second.jsonl", left)
    left, stats = quarantine(raw, [first, second])
    assert left == []
    assert stats.mended_rows == {"train": 2}
    assert '"first"' in texts(tmp_path / "data2")
    again = write_lines(tmp_path / "again.jsonl", [rows[0] | {"raw": {"prompt": "q", "completion": "anew"}}])
    with open_rows([raw], "train", [first, second, again]) as opened:
        assert json.loads(opened[0])["completion"] == "anew"


BROKEN = {3: "q3,a,3\n", 7: "q7,\udcff\n", 11: '"oops,a\n', 12: 'q,"fine"\n'}


def test_a_csv_row_is_fixed_as_a_line_of_its_file(tmp_path: Path) -> None:
    raw = table(tmp_path, BROKEN)
    rows, _ = quarantine(raw)
    assert [(row["row"], row["raw"]) for row in rows] == [(3, "q3,a,3\n"), (7, "q7,\\xff\n"), (11, '"oops,a\n')]
    rows[0]["raw"] = 'q3,"a,3"\n'
    rows[1]["raw"] = {"prompt": "q7", "completion": "ÿ"}
    rows[2]["raw"] = '"oops\nagain",a'
    left, stats = quarantine(raw, [write_lines(tmp_path / "fixed.jsonl", rows)])
    assert left == []
    assert stats.mended_rows == {"train": 3}
    assert all(f'"value":"{text}"' in texts(tmp_path / "data1") for text in ("a,3", "ÿ", "oops\\nagain"))


@pytest.mark.parametrize(
    ("edit", "detail"),
    [
        (lambda raw: raw, "3 fields, the header has 2"),
        (lambda raw: "q3,a,3,4\n", "4 fields, the header has 2"),
        (lambda raw: "q3,a\nq3,b\n", "2 rows instead of one"),
        (lambda raw: "", "0 rows instead of one"),
        (lambda raw: '"q3,a', "unexpected end of data"),
    ],
)
def test_a_csv_line_that_is_still_broken_is_rejected_again(tmp_path: Path, edit: Callable, detail: str) -> None:
    """Not an error: a person may fix one row of many. Bytes that are not UTF-8 remain so."""
    raw = table(tmp_path, BROKEN)
    rows, _ = quarantine(raw)
    rows[0]["raw"] = edit(rows[0]["raw"])
    left, stats = quarantine(raw, [write_lines(tmp_path / "fixed.jsonl", rows)])
    assert [(row["row"], row["reason"]) for row in left] == [(number, "bad_table_row") for number in (3, 7, 11)]
    assert left[0]["detail"] == detail
    assert left[0]["raw"] == rows[0]["raw"]
    assert [row["checksum"] for row in left] == [row["checksum"] for row in rows]
    assert stats.mended_rows == {"train": int(detail[0] != "3")}


def test_a_row_that_parquet_cannot_give_is_fixed_as_an_object(tmp_path: Path) -> None:
    cells = [b"a%d" % n if n != 4 else b"\xff" for n in range(20)]
    column = pa.Array.from_buffers(pa.string(), len(cells), pa.array(cells, pa.binary()).buffers())
    raw = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"prompt": [f"q{n}" for n in range(20)], "completion": column}), raw)
    rows, _ = quarantine(raw)
    assert [(row["row"], row["raw"]) for row in rows] == [(4, None)]
    fixed = write_lines(tmp_path / "fixed.jsonl", rows)
    assert quarantine(raw, [fixed])[1].mended_rows == {"train": 0}
    rows[0]["raw"] = {"prompt": "q4", "completion": "a4"}
    assert quarantine(raw, [write_lines(fixed, rows)])[0] == []


def test_tabs_separate_the_fields_of_a_fixed_line_of_tsv(tmp_path: Path) -> None:
    path = tmp_path / "rows.tsv"
    with path.open("w", newline="") as file:
        csv.writer(file, "excel-tab").writerows([["prompt", "completion"], ["q"], ["q1", "a1"]])
    line = {"split": "train", "row": 0, "file": "rows.tsv", "raw": "q\tit, too\r\n"}
    with open_rows([path], "train") as rows:
        line["checksum"] = rows.checksum(0)
    with open_rows([path], "train", [write_lines(tmp_path / "fixed.jsonl", [line])]) as rows:
        assert json.loads(rows[0]) == {"prompt": "q", "completion": "it, too"}
        assert not rows.faults


def test_a_row_written_in_other_spaces_is_not_edited(tmp_path: Path) -> None:
    """json.dumps and jq use their own spaces, escapes and order; 1.0 instead of 1 is an edit."""
    raw = tmp_path / "rows.jsonl"
    bad = '{"prompt":"ä\\n","completion":"","score":%s}\n'
    raw.write_text("".join(bad % n if n < 2 else f'{{"prompt":"q{n}","completion":"a"}}\n' for n in range(9)))
    rows, _ = quarantine(raw)
    left, stats = quarantine(raw, [write_lines(tmp_path / "same.jsonl", rows)])
    assert [row["row"] for row in left] == [0, 1]
    assert stats.mended_rows == {"train": 0}
    rows[0]["raw"] = dict(reversed(rows[0]["raw"].items()))
    rows[1]["raw"]["score"] = 1.0
    _, stats = quarantine(raw, [write_lines(tmp_path / "fixed.jsonl", rows)])
    assert stats.mended_rows == {"train": 1}


def test_a_row_with_a_key_twice_is_fixed_and_never_by_a_tool_that_drops_one(tmp_path: Path) -> None:
    """In the quarantine it is a text, which JSON's tools copy as it is."""
    raw = tmp_path / "rows.jsonl"
    twice = '{"prompt": "q", "completion": "first", "completion": "second"}'
    raw.write_text("".join(f'{{"prompt": "q{n}", "completion": "a"}}\n' for n in range(8)) + f"{twice}\n")
    (row,), _ = quarantine(raw)
    assert (row["reason"], row["raw"]) == ("duplicate_key", twice)
    assert row["detail"] == "the key 'completion' is given twice"
    (row,), stats = quarantine(raw, [write_lines(tmp_path / "copied.jsonl", [row])])
    assert (row["reason"], stats.mended_rows) == ("duplicate_key", {"train": 0})
    fixed: list[Any] = [twice.replace('"completion": "first", ', ""), json.loads(twice)]
    for number, whole in enumerate(fixed):
        left, stats = quarantine(raw, [write_lines(tmp_path / f"fixed{number}.jsonl", [row | {"raw": whole}])])
        assert (left, stats.mended_rows) == ([], {"train": 1})
