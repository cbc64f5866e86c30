import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from made_accounts import LENGTHS
from vlmflow.core.account import write_account
from vlmflow.core.errors import VlmflowError
from vlmflow.in_trainer.messages import RowLog
from vlmflow.lengths.count import RowLength
from vlmflow.lengths.summary import FittedRows, FittedSplit
from vlmflow.tools.rows_of_step import TrainedRow, newest_training, trained_rows

TURNS = [{"from": "human", "value": "Say \x1b[31mred\nand"}, {"from": "gpt", "value": "stop. " * 30}]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A run folder, and rows that fit, of which the second is hostile to terminals."""
    rows: list[dict[str, Any]] = [{"id": f"row-{number}", "source": "s", "conversations": TURNS} for number in range(3)]
    rows[1]["id"] = "row-\x1b]0;1"
    (tmp_path / "fitted").mkdir()
    begin, lengths = 0, b""
    with (tmp_path / "fitted" / "train.jsonl").open("wb") as file:
        for number, row in enumerate(rows):
            line = json.dumps(row).encode()
            lengths += msgspec.json.encode(RowLength(row["id"], begin, begin + len(line), 5 + number, 10)) + b"\n"
            begin += len(line) + 1
            file.write(line + b"\n")
    (tmp_path / "fitted" / "train.lengths.jsonl").write_bytes(lengths)
    split = FittedSplit(3, 0, 0, LENGTHS)
    digests = {"train.jsonl": "a", "val.jsonl": "b", "pictures": "c"}
    account = FittedRows("d", "trajectory", 20, split, split, digests)
    write_account(tmp_path / "fitted" / "account.json", account)
    folder = tmp_path / "runs" / "mine" / "full" / "digest"
    folder.mkdir(parents=True)
    (folder / "job.json").write_text(json.dumps({"data": {"digest": "abc", "train": "x"}, "processes": 2}))
    RowLog(folder, 0).write(1, [[2], [0, 1]])
    RowLog(folder, 1).write(1, [[1], [0]])
    return tmp_path


def test_a_steps_rows_are_shown_by_rank_and_pass(place: Path) -> None:
    folder = newest_training(place / "runs", "mine")
    found = trained_rows(folder, place / "fitted", 1)
    assert [(row.rank, row.forward_pass, row.tokens) for row in found] == [
        (0, 1, 17),
        (0, 2, 15),
        (0, 2, 16),
        (1, 1, 16),
        (1, 2, 15),
    ]
    assert found[0] == TrainedRow(0, 1, "row-2", 17, "s", ("Say �[31mred and " + "stop. " * 30)[:60])
    assert found[2].id == "row-�]0;1"


def test_a_step_that_was_not_reached_and_other_rows_are_said_so(place: Path) -> None:
    folder = newest_training(place / "runs", "mine")
    with pytest.raises(VlmflowError, match="step 2 has not begun; the last step that began is 1"):
        trained_rows(folder, place / "fitted", 2)
    account = place / "fitted" / "account.json"
    account.write_text(account.read_text().replace('"a"', '"x"'))
    with pytest.raises(VlmflowError, match="these are not the rows that"):
        trained_rows(folder, place / "fitted", 1)


def test_the_newest_training_of_a_run_is_meant(place: Path) -> None:
    older, newer = (place / "runs" / "mine" / "full" / name for name in ("z", "a"))
    for age, folder in ((100, older), (0, newer)):
        folder.mkdir()
        RowLog(folder, 0).write(1, [[0]])
        time = (folder / "rows_of_steps" / "rank-0.txt").stat().st_mtime + 10 - age
        os.utime(folder / "rows_of_steps" / "rank-0.txt", (time, time))
    assert newest_training(place / "runs", "mine") == newer
    with pytest.raises(VlmflowError, match="no full training of 'other' has begun a step"):
        newest_training(place / "runs", "other")
