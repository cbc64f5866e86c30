"""Two trainers of which one never sees a picture: no strategy waits for ever, and all train what DDP does."""

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from seeing_families import write_llava
from tiny_trainings import Tiny, losses_of
from trainer_faults import DEEPSPEED, FSDP2, before_trainers
from vlmflow.config.strategies import FULL, LORA, STRATEGIES, Tuner
from vlmflow.core.errors import VlmflowError
from vlmflow.in_trainer.messages import rows_of_step
from vlmflow.supervisor.train import train
from vlmflow.swift.arguments import BaseModel

STEPS = 3

LONGEST = 120
"""Seconds until a training counts as one that waits for ever."""

OF_THE_SECOND = {3, 4, 5}
"""The rows of the second trainer, by the run's seed."""

TUNERS = {"lora": LORA, "full": FULL}
FROZEN = {"frozen": ["vision_tower", "aligner"], "trained": []}

SETTINGS: dict[str, Any] = {
    "max_steps": STEPS,
    "checkpoint_steps": STEPS,
    "evaluation_steps": STEPS,
    "gradient_checkpointing": True,
    "learning_rate": 1e-3,
}

QUICK = [("lora", "frozen", "fsdp2"), ("full", "trained", "fsdp2")]
CELLS = [
    pytest.param(*cell, marks=[] if cell in QUICK else [pytest.mark.slow])
    for cell in product(TUNERS, FROZEN, ("zero2", "zero3", "fsdp2"))
]
"""ms-swift alone fails under FSDP2, and waits for ever where DDP trains the tower in full; DDP is the yardstick."""


@contextmanager
def watched() -> Iterator[None]:
    def waited(*_: object) -> None:
        raise TimeoutError(f"the trainers still wait after {LONGEST} s")

    before = signal.signal(signal.SIGALRM, waited)
    signal.alarm(LONGEST)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class Lopsided:
    """Rows of which the first trainer's have a picture, and the second's have none; the losses of what was trained."""

    def __init__(self, folder: Path) -> None:
        self.tiny = Tiny.write(folder, vision=True, rows=2 * STEPS, val_rows=2)
        self.runs = folder / "runs"
        self.losses: dict[tuple[str, str, str], list[float]] = {}
        file = folder / "train.jsonl"
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        for row in OF_THE_SECOND:
            turn = lines[row]["conversations"][0]
            turn["value"] = turn["value"].removeprefix("<image>\n")
            del lines[row]["images"]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def _train(self, tuner: str, tower: str, strategy: str) -> Path:
        kind: Tuner = TUNERS[tuner]
        training = self.tiny.training(kind, STRATEGIES[strategy], processes=2, freeze=FROZEN[tower], **SETTINGS)
        with watched():
            trained = train(training, self.runs, 2, "train_model r")
        self.losses[tuner, tower, strategy] = [loss for _, loss in losses_of(training, self.runs)]
        return trained.folder.path

    @staticmethod
    def _rows_of_ranks(run_folder: Path) -> dict[int, set[int]]:
        found: dict[int, set[int]] = {0: set(), 1: set()}
        for step in range(1, STEPS + 1):
            for rank, batches in rows_of_step(run_folder, step).items():
                found[rank] |= {row for batch in batches for row in batch}
        return found

    def trained(self, tuner: str, tower: str, strategy: str) -> list[float]:
        """Return the losses of all steps; the same training is made once."""
        cell = (tuner, tower, strategy)
        if cell not in self.losses:
            assert self._rows_of_ranks(self._train(*cell))[1] == OF_THE_SECOND
        return self.losses[cell]


@pytest.fixture(scope="module")
def lopsided(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lopsided]:
    with pytest.MonkeyPatch.context() as patch:
        before_trainers(tmp_path_factory.mktemp("before"), DEEPSPEED + FSDP2, patch)
        yield Lopsided(tmp_path_factory.mktemp("lopsided"))


@pytest.mark.parametrize(("tuner", "tower", "strategy"), CELLS)
def test_one_trainer_never_sees_a_picture(lopsided: Lopsided, tuner: str, tower: str, strategy: str) -> None:
    losses = lopsided.trained(tuner, tower, strategy)
    assert len(losses) == STEPS
    assert losses == pytest.approx(lopsided.trained(tuner, tower, "ddp"), rel=1e-4)


@pytest.mark.slow
def test_a_model_without_blank_pictures_is_refused(lopsided: Lopsided, tmp_path: Path) -> None:
    """LLaVA's tower is trained; ms-swift passes nothing through it for the second trainer's rows."""
    base = BaseModel(write_llava(tmp_path / "base"), "llava1_5_hf", "digest")
    settings = SETTINGS | {"swift_args": {"template": "llava1_5_hf"}}
    training = replace(lopsided.tiny.training(FULL, processes=2, freeze=[], **settings), model=base)
    with (
        watched(),
        pytest.raises(VlmflowError, match=r"a batch without pictures does not pass through model\.vision_t"),
    ):
        train(training, tmp_path / "runs", 2, "train_model r")
