"""Former trainings of a run: what a person reads of each before deleting it."""

import json
import os
from pathlib import Path

import pytest

from made_accounts import leave_training, some_report
from some_training import job
from vlmflow.in_trainer.messages import Begin, Log
from vlmflow.reports.former_trainings import former_trainings
from vlmflow.supervisor.report import TrainingDigests
from vlmflow.supervisor.run_folder import RunFolder

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
