"""A training that runs out of GPU memory: PyTorch's own error, raised in the real trainer at a chosen step."""

import json
from pathlib import Path

import pytest
import yaml

from tiny_models import write_text_model
from vlmflow.config.run_settings import TrainSettings
from vlmflow.config.strategies import DDP
from vlmflow.core.errors import PassingError, VlmflowError
from vlmflow.in_trainer.messages import Begin, Log, as_line
from vlmflow.rows.training_data import TrainingData
from vlmflow.supervisor.failures import HangError, Mark, OutOfGpuMemoryError, ResumableError, last_step, resume_once
from vlmflow.supervisor.run_folder import RunFolder
from vlmflow.supervisor.train import train
from vlmflow.swift.arguments import BaseModel, Training
from warm_programs import WARM
from workflow_runs import ROOT

SWIFT_ARGS = yaml.safe_load((ROOT / "config.yaml").read_text())["runs"]["qwen3-alpaca"]["train"]["swift_args"]

SMALL_GPU = """
import os, sys
if "vlmflow.in_trainer.process" in sys.orig_argv and "torch.distributed.run" not in sys.orig_argv:
    import torch, transformers
    step = transformers.Trainer.training_step

    def training_step(self, *args, **kwargs):
        if self.state.global_step == int(os.environ["VLMFLOW_TEST_STEPS_THAT_FIT"]):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return step(self, *args, **kwargs)

    transformers.Trainer.training_step = training_step
"""
"""Python runs this before the trainer's code (warm/sitecustomize.py)."""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Training:
    """Return a training of four steps on a text model of 60,000 weights, with a checkpoint after the second."""
    folder = tmp_path_factory.mktemp("memory")
    write_text_model(folder)
    turns = [{"from": "human", "value": "Say one."}, {"from": "gpt", "value": "It is one."}]
    row = {"id": "a", "source": "s", "images": [], "attempts": [1], "scores": [], "conversations": turns}
    (folder / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 8)
    settings = {"max_steps": 4, "checkpoint_steps": 2, "gradient_accumulation_steps": 1, "dtype": "float32"}
    settings |= {"max_length": 512, "dataloader_workers": 0, "swift_args": SWIFT_ARGS}
    rows = folder / "rows.jsonl"
    return Training(
        TrainingData(rows, rows, folder, "digest", last_answer_only=False),
        BaseModel(folder / "tiny", "qwen3", "digest"),
        TrainSettings(**settings),
        device="cpu",
        processes=1,
        strategy=DDP,
    )


@pytest.fixture
def small_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Make the trainers run out of memory after STEPS_THAT_FIT steps."""
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu" / "before.py").write_text(SMALL_GPU)
    monkeypatch.setenv("VLMFLOW_BEFORE", str(tmp_path / "gpu" / "before.py"))
    monkeypatch.setenv("PYTHONPATH", WARM)
    return monkeypatch


def launches(runs: Path) -> int:
    (progress,) = runs.glob("*/progress.jsonl")
    return progress.read_text().count('"begin"')


def test_a_training_is_resumed_once_and_stopped_at_the_same_step(
    job: Training, small_gpu: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    small_gpu.setenv("VLMFLOW_TEST_STEPS_THAT_FIT", "3")
    with pytest.raises(VlmflowError) as stopped:
        train(job, tmp_path / "runs", threads=2, label="train_model r")
    assert not isinstance(stopped.value, PassingError)
    assert "CUDA out of memory" in stopped.value.cause
    assert "after step 3; after step 3 before, and resumed from step 2 since" in stopped.value.cause
    assert "lower runs.NAME.train.max_length" in stopped.value.next_step
    assert "the same command resumes from step 2" in stopped.value.next_step
    assert launches(tmp_path / "runs") == 2


@pytest.mark.slow  # test_a_smoke_stage_is_not_resumed decides as quickly about a missing checkpoint
def test_before_the_first_checkpoint_nothing_is_tried_again(
    job: Training, small_gpu: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    small_gpu.setenv("VLMFLOW_TEST_STEPS_THAT_FIT", "1")
    with pytest.raises(VlmflowError, match="CUDA out of memory") as stopped:
        train(job, tmp_path / "runs", threads=2, label="train_model r")
    assert not isinstance(stopped.value, PassingError)
    assert launches(tmp_path / "runs") == 1


FULL = OutOfGpuMemoryError("r: CUDA out of memory", "lower it")


def test_each_checkpoint_is_resumed_from_once(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    begin, log = Begin(0, 900, 0, 1, "NOT_DISTRIBUTED", "cpu"), Log(9.0, 450, 900, 9, loss=1.0)
    folder.progress.write_text(f'{as_line(begin)}{as_line(log)}{{"event": "lo')
    assert last_step(folder.progress) == 450
    assert resume_once(folder, 400, FULL) == Mark("out of memory", 450, 400)
    assert resume_once(folder, 500, FULL) == Mark("out of memory", 450, 500)
    with pytest.raises(VlmflowError, match="resumed from step 500 since"):
        resume_once(folder, 500, FULL)
    with pytest.raises(VlmflowError, match="after step 450; out of memory after step 450 before, and"):
        resume_once(folder, 500, HangError("r: no sign of life", "look"))


def test_a_progress_line_of_another_version_does_not_hide_the_cause(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.progress.write_text(as_line(Begin(3, 9, 0, 1, "NOT_DISTRIBUTED", "cpu")) + '{"step": 4}\n' + "[" * 100_000)
    with pytest.raises(VlmflowError, match=r"CUDA out of memory \(after step 3\)"):
        resume_once(folder, None, FULL)


@pytest.mark.parametrize("fault", [FULL, HangError("r: no sign of life", "look")])
def test_a_smoke_stage_is_not_resumed(tmp_path: Path, fault: ResumableError) -> None:
    """train_smoke passes resumes=False, which gives no checkpoint here. A cluster retries only after a hang."""
    with pytest.raises(VlmflowError, match="after step 0") as stopped:
        resume_once(RunFolder(tmp_path), None, fault)
    assert isinstance(stopped.value, PassingError) is isinstance(fault, HangError)
