"""All strategies, also those for GPUs, trained by two processes on this machine's cores; most other tests train ddp."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from vlmflow.config.run_settings import TrainSettings
from vlmflow.config.strategies import DDP, STRATEGIES, Strategy
from vlmflow.core.errors import VlmflowError
from vlmflow.demo.tiny_model import TinyShape, write_tiny_model
from vlmflow.rows.training_data import TrainingData
from vlmflow.swift.arguments import BaseModel, Training
from vlmflow.training.released import release
from vlmflow.training.train import Trained, train

WORDS = ["red", "green", "blue"]

DEEPSPEED_ON_CPUS = """
import sys
if "--deepspeed" in sys.orig_argv and "torch.distributed.run" not in sys.orig_argv:
    import deepspeed
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
"""
"""transformers starts DeepSpeed's communication only on GPUs; on cores DeepSpeed would first compile a faster one."""

DRIFT = """
import os, sys
if "-m" in sys.orig_argv and "torch.distributed.run" not in sys.orig_argv and os.environ.get("RANK") == "1":
    import torch, transformers
    step = transformers.Trainer.training_step

    def training_step(self, model, *args, **kwargs):
        loss = step(self, model, *args, **kwargs)
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(weight.requires_grad)
        return loss

    transformers.Trainer.training_step = training_step
"""
"""Make the second process train other weights."""


def before_the_trainer(folder: Path, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make Python run some code (sitecustomize) before the trainers'."""
    (folder / "python").mkdir()
    (folder / "python" / "sitecustomize.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(folder / "python"))


def job(folder: Path, strategy: Strategy) -> Training:
    """Two steps of a tiny Qwen3, with a checkpoint after each. DeepSpeed has bfloat16 on cores, and no float32."""
    write_tiny_model(folder / "base", WORDS, TinyShape(), seed=1, vision=False)
    (folder / "pictures").mkdir()
    turns = [[{"from": "human", "value": f"Say {word}"}, {"from": "gpt", "value": word}] for word in WORDS + WORDS]
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"conversations": each}) + "\n" for each in turns))
    settings = TrainSettings(
        max_steps=2,
        checkpoint_steps=1,
        evaluation_steps=1,
        gradient_accumulation_steps=1,
        gradient_checkpointing=False,
        dataloader_workers=0,
        dtype="bfloat16",
        swift_args={"template": "qwen3"},
    )
    data = TrainingData(rows, rows, folder / "pictures", "digest", last_answer_only=False)
    return Training(data, BaseModel(folder / "base", "qwen3", "digest"), settings, "cpu", 2, strategy)


@pytest.mark.parametrize("name", sorted(STRATEGIES.keys() - {DDP.name}))
def test_it_trains_saves_complete_checkpoints_and_resumes(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before_the_trainer(tmp_path, DEEPSPEED_ON_CPUS, monkeypatch)
    training = job(tmp_path, STRATEGIES[name])
    first = train(training, tmp_path / "runs", 2, "train_lora r")
    assert first.last.step == 2
    whole = handed_on(first, tmp_path / "first")
    first.last.folder.rename(tmp_path / "last")
    with caplog.at_level("INFO", "vlmflow"):
        again = train(training, tmp_path / "runs", 2, "train_lora r")
    assert "resuming from step 1 of 2" in caplog.text
    assert handed_on(again, tmp_path / "again") == whole


def handed_on(trained: Trained, folder: Path) -> bytes:
    """Return the weights of the last checkpoint's adapter, none of which is empty."""
    folder.mkdir()
    release(trained.last.folder, folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    assert tensors
    assert all(tensor.numel() for tensor in tensors.values())
    return (folder / "adapter_model.safetensors").read_bytes()


def test_processes_that_hold_different_adapters_save_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before_the_trainer(tmp_path, DRIFT, monkeypatch)
    with pytest.raises(VlmflowError, match="not really distributed: 2 different adapters at one step"):
        train(job(tmp_path, DDP), tmp_path / "runs", 2, "train_lora r")
    assert not list((tmp_path / "runs").rglob("adapter_model.safetensors"))
