"""What a person reads of a run on the terminal: its summary, its former trainings, and the rows of a step."""

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from made_accounts import LENGTHS, leave_training, some_evaluation, some_provenance, some_report
from made_accounts import some_training as job
from vlmflow.core.account import write_account
from vlmflow.core.errors import VlmflowError
from vlmflow.evaluation.report import EvaluatedModel
from vlmflow.in_trainer.messages import Begin, Log, RowLog
from vlmflow.lengths.count import RowLength
from vlmflow.lengths.summary import FittedRows, FittedSplit
from vlmflow.reports.former_trainings import former_trainings
from vlmflow.reports.overview import summary, summary_files
from vlmflow.reports.provenance import published_weights
from vlmflow.supervisor.report import TrainingDigests
from vlmflow.supervisor.run_folder import RunFolder
from vlmflow.tools.rows_of_step import TrainedRow, newest_training, trained_rows


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_account(tmp_path / "merged/mine/provenance.json", some_provenance())
    return tmp_path


def lines(folder: Path) -> list[str]:
    return summary(folder, "mine", "fire", "runs/here/").splitlines()


def test_what_is_there_is_on_one_screen(folder: Path) -> None:
    (folder / "reports").mkdir()
    for page in ("data-fire", "run-mine", "run-other"):
        (folder / f"reports/{page}.html").touch()
    evaluation = some_evaluation(tuned=EvaluatedModel(published_weights(folder / "merged/mine")))
    write_account(folder / "eval/mine/test/report.json", evaluation)
    assert lines(folder) == [
        "",
        "mine is done.",
        "  rows        train: 1 in, 1 kept, 0 rejected",
        "              why: runs/here/data/fire/counts.html; the rows: runs/here/data/fire/quarantine.jsonl",
        "  lengths     10 tokens in the median row, 20 in the longest; over-long rows: 0 left out, 0 shortened",
        "  smoke gate  passed; the full run takes 2 h",
        "  validation  loss 3.00 at step 4, 2.00 at step 8",
        "              curve: runs/here/checkpoints/mine/full/loss.png",
        "  verdict     test: The tuned model learned to use feedback.",
        "  pages       runs/here/reports/data-fire.html",
        "              runs/here/reports/run-mine.html",
        "  weights     runs/here/merged/mine (verified; model card: README.md, origin: provenance.json)",
    ]


def test_a_verdict_on_other_weights_is_none(folder: Path) -> None:
    assert "  verdict     none yet: eval/mine/val compares it with its base" in lines(folder)
    write_account(folder / "eval/mine/val/report.json", some_evaluation())
    assert "  verdict     val: of other weights: remove eval/mine/val and make it again" in lines(folder)


def test_what_cannot_be_read_is_named(folder: Path) -> None:
    (folder / "eval/mine/val").mkdir(parents=True)
    (folder / "eval/mine/val/report.json").write_text("{}")
    assert any(line.startswith(f"  verdict     val: cannot be read: {folder}/eval/mine/val/") for line in lines(folder))
    (folder / "merged/mine/provenance.json").write_text("no JSON")
    said = lines(folder)
    assert said[2].startswith(f"  origin      cannot be read: {folder}/merged/mine/provenance.json: ")
    assert said[-1].startswith("  weights     runs/here/merged/mine ")


def test_every_file_that_is_read_is_listed(folder: Path) -> None:
    """On a cluster only these are copied from the storage."""
    for target, name in summary_files("mine", "fire"):
        place = folder / target / name
        place.parent.mkdir(parents=True, exist_ok=True)
        if not place.exists():
            write_account(place, some_evaluation())
    everything = lines(folder)
    listed = {folder / target / name for target, name in summary_files("mine", "fire")}
    assert {file for file in folder.rglob("*") if file.is_file()} == listed
    for file in listed:
        content = file.read_bytes()
        file.unlink()
        assert lines(folder) != everything, file
        file.write_bytes(content)


NAMES = [f"{number:016x}" for number in range(4)]
BEGIN = Begin(0, 8, 0, 4, "DISTRIBUTED", "cpu")
EVENTS = [
    BEGIN,
    *(Log(float(step), step, 8, 9, eval_loss=loss) for step, loss in ((2, float("nan")), (4, 1.5), (6, 1.75))),
]
PRESENT = some_report(digests=TrainingDigests(NAMES[0], "data", "model", {}, ""))


@pytest.fixture
def stage(tmp_path: Path) -> Path:
    """Return the folder of a run's run folders, with that of the present training."""
    leave_training(tmp_path / "full", NAMES[0], EVENTS)
    return tmp_path / "full"


def told(stage: Path) -> list[str]:
    return [str(one) for one in former_trainings(stage, PRESENT)]


def test_each_former_training_says_in_what_it_differs_and_what_it_came_to(stage: Path) -> None:
    assert told(stage) == []
    leave_training(stage, NAMES[1], EVENTS, learning_rate=2e-4, lora={"rank": 8})
    leave_training(stage, NAMES[2], [], seed=7)
    os.utime(stage / NAMES[1] / "job.json", (1, 1))
    (stage / "notes").mkdir()
    assert told(stage) == [
        "train.seed 7 (now 42); no step was made",
        "train.learning_rate 0.0002 (now 0.0001), train.lora.rank 8 (now 16); "
        "6 of 8 steps, lowest validation loss 1.500, at step 4",
    ]


def test_one_of_before_there_were_micro_batches_had_none(stage: Path) -> None:
    folder = leave_training(stage, NAMES[1], [], seed=7)
    written = json.loads((folder / "job.json").read_text())
    del written["settings"]["micro_batch_tokens"]
    (folder / "job.json").write_text(json.dumps(written))
    assert told(stage) == ["train.seed 7 (now 42); no step was made"]


def test_other_rows_and_another_base_are_named(stage: Path) -> None:
    folder = leave_training(stage, NAMES[1], EVENTS)
    written = json.loads((folder / "job.json").read_text())
    changed = written | {"data": {"digest": "d"}, "model": {"digest": "m"}, "nodes": 2}
    (folder / "job.json").write_text(json.dumps(changed))
    (one,) = told(stage)
    assert one.startswith("processes 8 (now 4), other rows and pictures, other base model; 6 of 8 steps")


def test_one_that_was_set_aside_says_why(stage: Path) -> None:
    leave_training(stage, f"{NAMES[0]}.refused-1", [BEGIN])
    assert told(stage) == ["set aside, because its input changed; 0 of 8 steps, no validation loss"]


def test_without_a_finished_training_the_newest_is_the_present_one(stage: Path) -> None:
    leave_training(stage, NAMES[1], EVENTS, seed=7)
    os.utime(stage / NAMES[0] / "job.json", (1, 1))
    (one,) = former_trainings(stage, None)
    assert (one.folder.name, one.differs) == (NAMES[0], "train.seed 42 (now 7)")
    assert former_trainings(stage.parent / "nothing", None) == []


@pytest.mark.parametrize("content", ["{", "[]", '{"data": 1}', '{"settings": {}}'])
def test_a_damaged_file_hides_no_training(stage: Path, content: str) -> None:
    folder = leave_training(stage, NAMES[1], EVENTS)
    (folder / "job.json").write_text(content)
    (one,) = told(stage)
    assert one.startswith(f"not compared: {folder}/job.json: ")
    assert one.endswith("; 6 of 8 steps, lowest validation loss 1.500, at step 4")
    os.utime(stage / NAMES[0] / "job.json", (1, 1))
    assert [former.folder.name for former in former_trainings(stage, None)] == [NAMES[0]]


def test_no_setting_steers_the_terminal(stage: Path) -> None:
    leave_training(stage, NAMES[1], EVENTS, swift_args={"template": "qwen3"})
    job = stage / NAMES[1] / "job.json"
    job.write_text(job.read_text().replace('"qwen3"', '"\\u001b[2J"'))
    assert told(stage)[0].startswith("train.swift_args.template \N{REPLACEMENT CHARACTER}[2J (now null)")


def test_what_a_training_writes_into_its_folder_is_read(stage: Path) -> None:
    training = job(learning_rate=2e-4)
    with RunFolder(stage / NAMES[1]).held(training.describe()):
        (one,) = told(stage)
    assert "train.learning_rate 0.0002 (now 0.0001)" in one
    assert "not compared" not in one


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
