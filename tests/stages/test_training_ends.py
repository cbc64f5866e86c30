"""Trainings that end before their last step: early by validation loss, or by SIGTERM during an evaluation."""

import json
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trainer_faults import DEEPSPEED, FSDP2, before_trainers
from vlmflow.config.run_settings import TrainSettings
from vlmflow.config.strategies import DDP, LORA, STRATEGIES, TUNERS, Strategy, Tuner
from vlmflow.config.strategies import DEEPSPEED as DEEPSPEED_JSON
from vlmflow.core.errors import InterruptedTrainingError
from vlmflow.demo.tiny_model import TinyShape, write_tiny_model
from vlmflow.lengths.steps import Steps
from vlmflow.rows.training_data import TrainingData
from vlmflow.supervisor.report import EndedEarly
from vlmflow.supervisor.train import Trained, report, train
from vlmflow.swift.arguments import BaseModel, Training
from warm_programs import fresh_torchrun

WORDS = ["red", "green", "blue", "one", "two", "three"]


def row(number: int) -> dict[str, Any]:
    question, answer = WORDS[number % 6], " ".join(WORDS[: 1 + number % 5])
    return {"conversations": [{"from": "human", "value": f"Say {question}"}, {"from": "gpt", "value": answer}]}


def job(folder: Path, rows: int, val_rows: int, processes: int, **settings: Any) -> Training:
    """A training of a tiny Qwen3 on rows without pictures, evaluated after every step."""
    write_tiny_model(folder / "base", WORDS, TinyShape(), seed=1, vision=False)
    (folder / "pictures").mkdir()
    for split, count in (("train", rows), ("val", val_rows)):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row(number)) + "\n" for number in range(count)))
    values = {
        "checkpoint_steps": 1,
        "evaluation_steps": 1,
        "gradient_accumulation_steps": 1,
        "gradient_checkpointing": False,
        "dataloader_workers": 0,
        "dtype": "float32",
        "swift_args": {"template": "qwen3"},
    }
    data = TrainingData(folder / "train.jsonl", folder / "val.jsonl", folder / "pictures", "digest", False)
    base = BaseModel(folder / "base", "qwen3", "digest")
    return Training(data, base, TrainSettings(**values | settings), "cpu", processes, DDP)


def test_a_training_whose_loss_stalls_ends_early_and_well(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It counted as an interruption, each time: "run the same command again"."""
    stalling = job(tmp_path, 8, 2, 1, max_steps=8, learning_rate=1e-12, early_stop_after=2)
    with caplog.at_level("INFO", "vlmflow"):
        trained = train(stalling, tmp_path / "runs", 2, "train_model r")
    assert 3 <= trained.last.step < 8
    told = report(stalling, trained)
    assert (told.steps, told.target) == (trained.last.step, 8)
    assert told.ended_early == EndedEarly(2, trained.last.step - 2, told.best.eval_loss)
    assert told.best.step == trained.last.step - 2
    assert "ended early at step" in caplog.text
    assert list((trained.folder.output / "runs").glob("events.out.tfevents.*")), "TensorBoard's curves"
    assert not (trained.folder.output / "images").exists(), "ms-swift's pictures of them take seconds"
    sessions = trained.folder.progress.read_text()
    assert train(stalling, tmp_path / "runs", 2, "train_model r").last.step == trained.last.step
    assert trained.folder.progress.read_text() == sessions, "nothing is trained again"


@pytest.mark.slow
def test_losses_do_not_depend_on_evaluations(tmp_path: Path) -> None:
    """So a resumed training that makes up for an evaluation has the losses of an unbroken one."""
    often = job(tmp_path, 8, 2, 1, max_steps=4)
    once = replace(often, settings=often.settings.model_copy(update={"checkpoint_steps": 4, "evaluation_steps": 4}))
    one, other = (report(each, train(each, tmp_path / "runs", 2, "train_model r")) for each in (often, once))
    assert (len(one.eval_losses), len(other.eval_losses)) == (4, 1)
    assert one.losses == other.losses


def interrupted_in_the_evaluation_of(step: int, whole: Training, runs: Path) -> None:
    """Train until transformers logs the loss of `step`, before it evaluates; then send SIGTERM."""
    progress = runs / whole.digest() / "progress.jsonl"
    over = threading.Event()

    def send() -> None:
        while not over.is_set():
            if step in logged(progress, "loss"):
                return os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.02)

    sender = threading.Thread(target=send)
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # if it is too late, it must not end the tests
    try:
        sender.start()
        with (
            pytest.raises(InterruptedTrainingError, match=f"interrupted, with step {step} of 2") as ended,
            fresh_torchrun(),
        ):
            train(whole, runs, 2, "train_model r")
        assert ended.value.saved
    finally:
        over.set()
        sender.join()
        signal.signal(signal.SIGTERM, before)


def refused_by_trainers_that_do_nothing(whole: Training, runs: Path) -> str:
    """Train with trainers that end before a step, and well; return why it is no progress."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vlmflow.supervisor.train.Launcher.launch", lambda *given: None)
        with pytest.raises(InterruptedTrainingError) as ended:
            train(whole, runs, 2, "train_model r")
    assert not ended.value.saved
    return ended.value.cause


@pytest.mark.parametrize("step", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_sigterm_within_an_evaluation_saves_the_step_and_the_evaluation_is_made_up_for(
    tmp_path: Path, step: int
) -> None:
    """All ranks of two processes stop after the same batch; step 2 is the last."""
    whole = job(tmp_path, 5, 150, 2, epochs=1)
    assert Steps.of(5, whole.settings, 2) == Steps(total=2, per_epoch=2, rows=4, left_over=1)
    progress = tmp_path / "runs" / whole.digest() / "progress.jsonl"
    assert "before its first checkpoint" in refused_by_trainers_that_do_nothing(whole, tmp_path / "runs")
    interrupted_in_the_evaluation_of(step, whole, tmp_path / "runs")
    if step == 1:
        assert "with step 1 of 2" in refused_by_trainers_that_do_nothing(whole, tmp_path / "runs")
    assert logged(progress, "eval_loss") == list(range(1, step))
    trained: Trained = train(whole, tmp_path / "runs", 2, "train_model r")
    told = report(whole, trained)
    assert (told.steps, told.target, told.ended_early, told.sessions) == (2, 2, None, 2)
    assert [step for step, _ in told.losses] == [1, 2]
    assert [step for step, _ in told.eval_losses] == [1, 2]
    lowest = min(told.eval_losses, key=lambda entry: entry[1])
    assert (told.best.step, told.best.eval_loss) == (lowest[0], pytest.approx(lowest[1], abs=1e-6))
    assert trained.best.folder.name == f"checkpoint-{lowest[0]}"


def logged(progress: Path, key: str) -> list[int]:
    """Return the steps of which a trainer logged a value."""
    lines = progress.read_text().splitlines(keepends=True) if progress.exists() else []
    events = [json.loads(line) for line in lines if line.endswith("\n")]
    return [event["step"] for event in events if key in event]


ENTRIES = [
    *((LORA, STRATEGIES[name]) for name in LORA.strategies if name not in (DDP.name, DEEPSPEED_JSON.name)),
    *((tuner, DDP) for tuner in TUNERS.values() if tuner is not LORA),
]


@pytest.mark.slow
@pytest.mark.parametrize(("tuner", "strategy"), ENTRIES, ids=lambda entry: entry.name)
def test_every_entry_ends_early(
    tmp_path: Path, tuner: Tuner, strategy: Strategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes, and three val rows: all ranks make as many forward passes, and end at the same step."""
    before_trainers(tmp_path, DEEPSPEED + FSDP2, monkeypatch)
    dtype = {"dtype": "float32" if strategy is DDP else "bfloat16"}
    settings = {"max_steps": 9, "learning_rate": 1e-12, "early_stop_after": 1, **dtype}
    stalling = replace(job(tmp_path, 8, 3, 2, **settings), tuner=tuner, strategy=strategy)
    trained = train(stalling, tmp_path / "runs", 2, "train_model r")
    told = report(stalling, trained)
    assert (told.steps, told.target) == (trained.last.step, 9)
    assert told.steps < 9
    assert told.ended_early == EndedEarly(1, told.steps - 1, told.best.eval_loss)
    assert told.eval_rows == 3
