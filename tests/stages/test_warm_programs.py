"""Programs of tests that fork from a process with their imports give what those give that start by themselves."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

import session_folder
from tiny_trainings import Tiny, losses_of
from vlmflow.training.train import train
from warm_programs import fresh

STATES = ("optimizer.pt", "scheduler.pt", "rng_state_0.pth", "rng_state_1.pth")


def test_a_forked_and_a_fresh_trainer_write_the_same_checkpoint(tmp_path: Path) -> None:
    tiny = Tiny.write(tmp_path, vision=True)
    training = tiny.training(processes=2, max_steps=3, checkpoint_steps=1, evaluation_steps=1)
    forked = train(training, tmp_path / "forked", 2, "train_model r")
    with fresh():
        alone = train(training, tmp_path / "alone", 2, "train_model r")
    handed_over = (session_folder.folder() / ".venv.log").read_text()
    assert str(tmp_path / "forked") in handed_over
    assert str(tmp_path / "alone") not in handed_over
    here, there = forked.last.folder, alone.last.folder
    assert {file.name for file in here.iterdir()} == {file.name for file in there.iterdir()} > set(STATES)
    for file in here.glob("*.safetensors"):
        assert file.read_bytes() == (there / file.name).read_bytes()
    for name in STATES:
        assert same(*(torch.load(folder / name, weights_only=False) for folder in (here, there))), name
    assert losses_of(training, tmp_path / "forked") == losses_of(training, tmp_path / "alone")


def same(one: Any, other: Any) -> bool:
    """Compare what torch saved, to the last bit."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(np.array_equal(np.asarray(one), np.asarray(other)))
