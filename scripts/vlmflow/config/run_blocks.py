"""The blocks of a run's settings that several stages use; the block of a single stage is in its script."""

from typing import Any

from vlmflow.config.run_settings import TrainSettings
from vlmflow.config.settings import Settings


class LengthBlock(Settings):
    """The settings that decide how many tokens a row has; see docs/config.md."""

    model_type: str
    image_max_tokens: int
    text_args: dict[str, Any]
    """The part of swift_args that changes the text."""


class EvaluationBlock(Settings):
    """The settings that decide which rows compare the tuned model with its base, and how; see docs/config.md."""

    rows: int
    """How many rows are evaluated; answers are asked for no others."""

    feedback: bool | None
    seed: int
    text_args: dict[str, Any]
    image_max_tokens: int
    max_length: int
    device: str
    dtype: str


class TrainBlock(Settings):
    """The settings that decide how a run trains; see docs/config.md."""

    model_type: str
    train: TrainSettings
    device: str
    nodes: int
    processes: int
    strategy: str
    deepspeed: dict[str, Any] | None
    tuner: str


class EstimateBlock(Settings):
    """The settings that decide what a run needs; see docs/config.md."""

    train: TrainSettings
    device: str
    nodes: int
    processes: int
    strategy: str
    deepspeed: dict[str, Any] | None
    tuner: str
    over_long: str
    gpu: str | None
    gpu_hour_price: float | None
    network_gbit: float
    estimate: str
    compared_rows: int
    """Rows on which the tuned model is compared with its base; 0 without a block `evaluate`."""
