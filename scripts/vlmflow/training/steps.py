"""Computes the steps of a training from its rows, with the trainer's own arithmetic."""

import math
from dataclasses import dataclass
from typing import Self

from vlmflow.config.run_settings import TrainSettings


@dataclass(frozen=True)
class Steps:
    """total: optimizer steps of the whole run. per_epoch: those of one pass over the rows.

    rows: those that one pass trains on. left_over: the number of last rows of the file that no pass trains on, because
    each process takes equally many (ms-swift 4.6, dataloader/shard.py, `BatchSamplerShard`).
    """

    total: int
    per_epoch: int
    rows: int
    left_over: int

    @classmethod
    def of(cls, rows: int, settings: TrainSettings, processes: int) -> Self:
        """Count as transformers does (5.19, trainer.py, `set_initial_training_values`).

        An epoch may end with a smaller step. rows: those of the train split. Packing and sequence parallelism
        (swift_args) change what counts as a row; this function ignores them.
        """
        each = rows // processes
        batches = math.ceil(each / settings.per_device_batch_size)
        per_epoch = max(1, math.ceil(batches / settings.gradient_accumulation_steps))
        total = settings.max_steps or math.ceil(settings.epochs * per_epoch)
        return cls(total, per_epoch, each * processes, rows - each * processes)
