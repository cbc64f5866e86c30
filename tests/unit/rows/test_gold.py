"""The right answers of FIRE's raw rows, found by the ids of training rows."""

import json
from pathlib import Path
from typing import Any

import pytest

from vlmflow.core.errors import VlmflowError
from vlmflow.rows.forms.fire import read_gold
from vlmflow.rows.raw_text import row_id
from vlmflow.rows.trajectories import gold_answers


def raw_file(folder: Path, *truths: Any) -> tuple[Path, list[str]]:
    """Write raw rows, and return the file with the ids of the rows."""
    rows = [json.dumps({"groundtruth": truth}).encode() for truth in truths]
    file = folder / "raw.jsonl"
    file.write_bytes(b"\n".join(rows) + b"\n")
    return file, [row_id("train", number, row) for number, row in enumerate(rows)]


def test_answers_are_those_of_the_rows(tmp_path: Path) -> None:
    file, ids = raw_file(tmp_path, *({"role": "user", "value": f" gold {n}\r\n"} for n in range(3)))
    wanted = [ids[2], f"{ids[0]}-a3", f"{ids[1]}-single", "made-by-hand"]
    found = gold_answers(wanted, {"train": [file], "test": []}, [], read_gold)
    assert found == {ids[2]: "gold 2", f"{ids[0]}-a3": "gold 0", f"{ids[1]}-single": "gold 1"}
    assert gold_answers(ids, {"train": [], "test": [file]}, [], read_gold) == {}


@pytest.mark.parametrize("truth", [None, "a text", {"value": 3}, {"role": "user", "value": "  "}, ["a"], {}])
def test_a_row_without_a_readable_answer_has_none(tmp_path: Path, truth: Any) -> None:
    file, ids = raw_file(tmp_path, truth)
    assert gold_answers(ids, {"train": [file]}, [], read_gold) == {}


def test_nothing_that_is_not_json_has_an_answer() -> None:
    assert [read_gold(row) for row in (b"", b"\xff", b"[" * 100_000, b"{}")] == [None] * 4


def test_a_fixed_row_gives_its_own_answer(tmp_path: Path) -> None:
    file, _ = raw_file(tmp_path, {"role": "user", "value": "old"})
    fixed = b'{"groundtruth":{"role":"user","value":"new"}}'
    old = file.read_bytes().rstrip()
    line = {"split": "train", "row": 0, "file": file.name, "checksum": row_id("train", 0, old)[-8:]}
    copy = tmp_path / "fixed.jsonl"
    copy.write_bytes(json.dumps(line).encode()[:-1] + b', "raw": ' + fixed + b"}\n")
    identity = row_id("train", 0, fixed)
    assert gold_answers([identity], {"train": [file]}, [copy], read_gold) == {identity: "new"}


def test_another_raw_row_is_refused(tmp_path: Path) -> None:
    file, ids = raw_file(tmp_path, {"role": "user", "value": "a"}, {"role": "user", "value": "b"})
    for identity in (ids[0].replace("train-0000000", "train-0000001"), ids[0].replace("0000000", "0000009")):
        with pytest.raises(VlmflowError, match=rf"row \d is not the one from which row {identity} was made"):
            gold_answers([identity], {"train": [file]}, [], read_gold)
