"""A training with nothing of its own, as tests ask for it."""

from pathlib import Path
from typing import Any

from vlmflow.config.run_settings import TrainSettings
from vlmflow.config.strategies import strategy_of
from vlmflow.rows.training_data import TrainingData
from vlmflow.swift.arguments import BaseModel, Training

DATA = TrainingData(Path("d/train.jsonl"), Path("d/val.jsonl"), Path("pictures/fire"), "data-digest", False)
MODEL = BaseModel(Path("/models/m"), "qwen3_vl", "model-digest")


def job(device: str = "cuda", processes: int = 4, strategy: str = "ddp", data: Any = DATA, **settings: Any) -> Training:
    """Return a training. settings: those of `train`."""
    return Training(data, MODEL, TrainSettings(**settings), device, processes, strategy_of(strategy))
