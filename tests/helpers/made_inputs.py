"""A run of a small model for the estimate, without files."""

import functools
import json
from dataclasses import replace
from typing import Any

from vlmflow.config.run_settings import RunSettings, TrainSettings
from vlmflow.config.settings import part_of
from vlmflow.estimate.run import EstimateInput, RowLengths, TrainingMode, inputs_of
from vlmflow.estimate.shape import CONFIG, Files, ModelShape, read_shape, shape_of
from workflow_runs import ROOT

TEXT = {
    "vocab_size": 151_936,
    "hidden_size": 4_096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
"""The language model of Qwen3-VL-8B-Instruct."""

PUBLISHED = ROOT / "tests" / "published" / "Qwen3-VL-8B-Instruct"
PROCESSOR = PUBLISHED / "preprocessor_config.json"


@functools.cache
def shape_8b() -> ModelShape:
    """Return the sizes of Qwen3-VL-8B-Instruct."""
    return read_shape(PUBLISHED)


def text_shape(model_type: str = "qwen3", **sizes: Any) -> ModelShape:
    """Return the sizes of a model of text alone; sizes: those that differ from TEXT."""
    return shape_of(Files({CONFIG: json.dumps({"model_type": model_type} | TEXT | sizes)}))


ROWS = [(60 + 37 * number % 1_900, 256 * (number % 4)) for number in range(400)]
"""Text and picture tokens."""

USUAL: dict[str, Any] = {
    "device": "cuda",
    "nodes": 1,
    "processes": 1,
    "strategy": "ddp",
    "deepspeed": None,
    "tuner": "lora",
    "over_long": "leave_out",
    "gpu": None,
    "gpu_hour_price": None,
    "network_gbit": 100,
    "estimate": "check",
    "compared_rows": 0,
}


def settings_of(train: dict[str, Any] | None = None, **others: Any) -> RunSettings:
    """Give a run's settings; train: those of its `train` block, with one row per pass if it does not say otherwise."""
    one_each = {"micro_batch_tokens": None, "gradient_checkpointing": True}
    unchecked = {"deepspeed": others.pop("deepspeed", None)}
    return part_of(RunSettings, USUAL | {"train": one_each | (train or {})} | others).model_copy(update=unchecked)


def mode_of(train: dict[str, Any] | None = None, **others: Any) -> TrainingMode:
    """Give a way to train; train: settings of its `train` block, others: fields of TrainingMode."""
    return TrainingMode(TrainSettings(**train or {}), **others)


def changed(mode: TrainingMode, **train: Any) -> TrainingMode:
    """Give the same way to train with other settings of its `train` block."""
    return replace(mode, settings=TrainSettings(**mode.settings.model_dump(exclude_unset=True) | train))


def some_inputs(
    train: dict[str, Any] | None = None,
    rows: list[tuple[int, int]] | None = None,
    shape: ModelShape | None = None,
    **others: Any,
) -> EstimateInput:
    """Give a run with some rows to train on, a tenth of which are also its val split."""
    lengths = ROWS if rows is None else rows
    return inputs_of(
        shape or shape_8b(), settings_of(train, **others), RowLengths.of(lengths), RowLengths.of(lengths[::10])
    )
