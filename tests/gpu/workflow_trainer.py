"""The workflow's own trainer, ms-swift, started as `train_model` starts it: one process, on one GPU."""

import importlib.metadata
from collections.abc import Sequence
from pathlib import Path

import msgspec

from gpu.trained import Trained
from vlmflow.config.run_settings import TrainSettings
from vlmflow.config.strategies import DDP
from vlmflow.rows.sharegpt import ShareGptRow
from vlmflow.rows.training_data import TrainingData
from vlmflow.swift.arguments import BaseModel, Training
from vlmflow.trainer.events import End, Log, read_events
from vlmflow.training.train import train

HELD_OUT = 8
"""Rows for the one evaluation, after the last step; it is not measured."""


def train_as_the_workflow(
    base: Path,
    rows: Sequence[ShareGptRow],
    pictures: Path,
    settings: TrainSettings,
    warm_up: int,
    runs: Path,
    device: str,
    threads: int,
) -> Trained:
    """Train settings.max_steps optimizer steps on the rows, in a run folder under `runs`.

    pictures: the folder that the rows' picture names are relative to. warm_up: steps before the measured ones.

    Raises VlmflowError as the workflow's stage would.
    """
    runs.mkdir()
    train_rows, val_rows = runs / "train.jsonl", runs / "val.jsonl"
    encode = msgspec.json.Encoder().encode_lines
    train_rows.write_bytes(encode(rows[HELD_OUT:]))
    val_rows.write_bytes(encode(rows[:HELD_OUT]))
    data = TrainingData(train_rows, val_rows, pictures, digest="sample", last_answer_only=False)
    model = BaseModel(base, "qwen3_vl", digest="random")
    trained = train(Training(data, model, settings, device, 1, DDP), runs, threads, "gpu-check: training")
    events = read_events(trained.folder.progress)
    steps = [event for event in events if isinstance(event, Log) and event.loss is not msgspec.UNSET]
    (ended,) = (event for event in events if isinstance(event, End))
    begin, end = steps[warm_up - 1], steps[-1]
    return Trained(
        trainer=f"ms-swift {importlib.metadata.version('ms-swift')}, as the workflow starts it",
        adapter=trained.last.folder,
        losses=[event.loss for event in steps],
        seconds=end.time - begin.time,
        tokens=end.tokens - begin.tokens,
        positions=None,
        allocated=None,
        reserved=ended.peak_memory[0] if device == "cuda" else None,
    )
