"""Computes the steps of a training from its rows, with the trainer's own arithmetic."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from vlmflow.config.run_settings import TrainSettings


@dataclass(frozen=True)
class Steps:
    """total: optimizer steps of the whole run. per_epoch: those of one pass over the rows.

    rows: those that one pass trains on. left_over: how many it does not train on, because each process takes equally
    many (ms-swift 4.6, dataloader/shard.py, `BatchSamplerShard`). With sequence parallelism a pass repeats some
    instead (sequence_parallel/utils.py, `SequenceParallelSampler`).
    """

    total: int
    per_epoch: int
    rows: int
    left_over: int

    @classmethod
    def of(cls, rows: int, settings: TrainSettings, processes: int) -> Self:
        """Count as transformers does (5.19, trainer.py, `set_initial_training_values`).

        An epoch may end with a smaller step. rows: those of the train split.
        """
        ranks, each = data_parallel_ranks(settings, processes), _each(rows, settings, processes)
        batches = math.ceil(each / settings.per_device_batch_size)
        per_epoch = max(1, math.ceil(batches / settings.gradient_accumulation_steps))
        total = settings.max_steps or math.ceil(settings.epochs * per_epoch)
        trained = min(rows, each * ranks)
        return cls(total, per_epoch, trained, rows - trained)


def data_parallel_ranks(settings: TrainSettings, processes: int) -> int:
    """Return how many rows the processes train at the same time; with sequence parallelism several share each."""
    return processes // settings.sequence_parallel


def _each(rows: int, settings: TrainSettings, processes: int) -> int:
    """Return how many rows each process takes in a pass."""
    ranks = data_parallel_ranks(settings, processes)
    return math.ceil(rows / ranks) if settings.sequence_parallel > 1 else rows // ranks


def scheduled(settings: TrainSettings, rows: int, processes: int) -> TrainSettings:
    """Return the settings with the steps between checkpoints and evaluations of this run.

    rows: those of its train split.
    """
    return settings.scheduled(Steps.of(rows, settings, processes).total)


def evaluations_of(steps: int, settings: TrainSettings) -> int:
    """Return how often a run of so many steps is evaluated."""
    return math.ceil(steps / settings.scheduled(steps).evaluate_every)


def schedule_in_words(steps: int, evaluations: int) -> str:
    """Return how many checkpoints a run chooses from, for people."""
    times = f"{evaluations:,} evaluations" if evaluations != 1 else "1 evaluation: nothing to choose from"
    return f"{steps:,} step{'s' if steps != 1 else ''}, {times}"


def rows_left_over(lengths: Sequence[int], settings: TrainSettings, processes: int) -> list[int]:
    """Return the rows that a run never trains on, by their lines in the train file, from 0.

    They are too few for another row on each process, or the run ends before it reaches them: with max_steps, or in a
    part of a pass. lengths: tokens of each row.
    """
    count = Steps.of(len(lengths), settings, processes)
    passes, rest = divmod(count.total, count.per_epoch)
    if passes and not (settings.group_by_length and settings.sequence_parallel == 1):
        reached = set(range(count.rows))  # each whole pass takes these, in another order
    else:
        steps = [*[count.per_epoch] * passes, rest]
        taken = (_taken(lengths, settings, processes, *one) for one in enumerate(steps))
        reached = {row for one in taken for row in one}
    return [row for row in range(len(lengths)) if row not in reached]


def _taken(lengths: Sequence[int], settings: TrainSettings, processes: int, epoch: int, steps: int) -> list[int]:
    """Return the rows that the first steps of a pass take, drawn as ms-swift's samplers do.

    With group_by_length the sampler draws all rows, and the first ranks may have a row more than the others. It is
    trained on if it fits into the last batch of the others, because the trainer takes equally many batches on each.
    """
    import torch

    ranks, size = data_parallel_ranks(settings, processes), settings.per_device_batch_size
    rows = len(lengths)
    each = _each(rows, settings, processes)
    batches = min(math.ceil(each / size), steps * settings.gradient_accumulation_steps)
    generator = torch.Generator()
    generator.manual_seed(settings.seed + epoch)
    if settings.sequence_parallel > 1:
        drawn: list[int] = torch.randperm(rows, generator=generator).tolist()
        order = (drawn * (each * ranks // rows + 1))[: each * ranks]
    elif settings.group_by_length:
        from transformers.trainer_pt_utils import get_length_grouped_indices

        order = get_length_grouped_indices(list(lengths), size * processes, generator=generator)
    else:
        order = torch.randperm(each * ranks, generator=generator).tolist()
    return order[: batches * size * ranks]
