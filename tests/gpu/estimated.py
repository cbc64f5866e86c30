"""The estimate of the check's own training, beside what was measured."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu.batches import RowSize
from gpu.trained import Trained
from vlmflow.config.gpus import Gpu
from vlmflow.config.run_blocks import EstimateBlock
from vlmflow.config.run_settings import TrainSettings
from vlmflow.config.strategies import DDP
from vlmflow.config.tuners import LORA
from vlmflow.estimate.case import Case, case_of
from vlmflow.estimate.memory import memory
from vlmflow.estimate.row_lengths import RowLengths
from vlmflow.estimate.shape import read_shape
from vlmflow.estimate.times import times


def case_of_check(base: Path, rows: Sequence[RowSize], settings: TrainSettings) -> Case:
    """Return the check's training as the estimate sees it. base: the model's folder. rows: all of the sample."""
    shape = read_shape(base)
    assert shape.vision is not None
    each = shape.vision.patches_per_token
    lengths = RowLengths.of([(row.tokens - row.patches // each, row.patches // each) for row in rows])
    block = {"device": "cuda", "nodes": 1, "processes": 1, "strategy": DDP.name, "deepspeed": None, "tuner": LORA.name}
    block["over_long"] = "leave_out"
    run = EstimateBlock(
        train=settings, gpu=None, gpu_hour_price=None, network_gbit=100, estimate="check", compared_rows=0, **block
    )
    return case_of(shape, run, lengths, lengths)


def estimated(case: Case, trained: Trained, peak: float, steps: int) -> dict[str, Any]:
    """Return memory and seconds of a step, estimated and measured, and by how much the estimate is off.

    peak: operations per second of this device in a large product. steps: those that were measured.
    memory_error is null where no memory was measured; step_error is 0 within the range of the estimate.
    """
    needed = memory(case)
    tensors = needed.total - needed.context  # PyTorch counts what it reserves, and nothing of CUDA itself
    passes = case.settings.gradient_accumulation_steps
    here = Gpu("here", "this device", 1, peak, math.inf, math.inf, "measured here")
    fast, slow = (
        passes * found.exchange_seconds
        + max(passes * found.batch_seconds, trained.tokens / steps * found.token_seconds)
        + found.step_seconds
        for found in (times(case, here, fast=fast) for fast in (True, False))
    )
    took = trained.seconds / steps
    return {
        "memory": tensors,
        "measured_memory": trained.reserved,
        "memory_error": None if trained.reserved is None else tensors / trained.reserved - 1,
        "step_seconds": [fast, slow],
        "measured_step_seconds": took,
        "step_error": min(max(took, fast), slow) / took - 1,
    }
