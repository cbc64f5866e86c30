"""Computes the steps of a training from its rows, with the trainer's own arithmetic, and cuts them into micro-batches.

The cut is a pure function of lengths and a number of tokens. The loss of a step does not depend on it, and a GPU waits
for Python in each forward pass: with short rows, few full micro-batches take a fraction of the time of many small ones.

Processes wait for each other in each micro-batch, so each has the same number of them in a step, and the k-th takes as
long as the dearest k-th of any process. The plan minimises their sum. Nothing measured enters, so that each process,
each resume and each machine has the same plan.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from vlmflow.config.run_settings import TrainSettings

if TYPE_CHECKING:
    from vlmflow.lengths.count import RowLength


FEWEST_TOKENS = 4096
"""A micro-batch costs at least as much as one of so many tokens: below, the GPU waits for its kernels to be started."""

PICTURE_TOKEN = 1.125
"""What a picture's token costs, in tokens of text: the vision tower's forward pass has about an eighth of the language
model's work for it."""

NUMBERS = [1024 * 2**power for power in range(8)]
"""The tokens that a micro-batch may have where the smoke run finds the number: 1,024 to 131,072."""

FIRST = 8192
"""The number to begin with where no estimate of the memory exists."""

FORWARD_AND_BACKWARD, AND_AGAIN = 3, 4
"""The work of a pass, in forward passes: without and with computing activations again."""

TRIED = 4
"""So many numbers of micro-batches are tried, from the fewest on: the fewest full ones may be unequal."""

LEAP = 32
"""Where rows do not fit, a number of micro-batches grows by this part of it: an evaluation plans all rows at once."""

Step = list[list[list[int]]]
"""The rows of a step by process, then by micro-batch."""


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
        taken = (_taken(lengths, settings, processes, *step) for step in enumerate(steps))
        reached = {row for rows in taken for row in rows}
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


@dataclass(frozen=True)
class Planner:
    """Plans steps.

    sizes: each row's tokens, where picture tokens count PICTURE_TOKEN. processes: those that wait for each other.
    most: the tokens of a micro-batch; a longer row stands alone. padded: whether a micro-batch's rows are filled up to
    the longest of them, and do not stand in one sequence.
    """

    sizes: Sequence[int]
    processes: int
    most: int
    padded: bool = False

    def step(self, rows: Sequence[int]) -> Step:
        """Return the micro-batches of each process.

        Processes have equally many if the rows are a multiple of them. Otherwise, where each row has a micro-batch of
        its own, the first processes have one more.
        """
        longest_first = sorted(rows, key=lambda row: (-self.sizes[row], row))
        deal = self._by_length if self.padded else self._in_one_sequence
        count = max(1, -(-sum(self.sizes[row] for row in rows) // (self.processes * self.most)))
        tried: list[tuple[int, list[list[int]]]] = []
        while count * self.processes <= len(rows) and len(tried) < TRIED:
            bins = deal(longest_first, count * self.processes)
            if bins is None:
                count += 1 + count // LEAP
                continue
            bins.sort(key=self._cost, reverse=True)
            tried.append((self.cost(bins), bins))
            count += 1
        _, bins = min(tried, key=lambda plan: plan[0], default=(0, [[row] for row in longest_first]))
        return [bins[process :: self.processes] for process in range(self.processes)]

    def cost(self, bins: Sequence[Sequence[int]]) -> int:
        """Return the cost of a step in tokens. bins: its micro-batches; so many as processes are trained at a time."""
        each = [self._cost(rows) for rows in bins]
        return sum(max(each[at : at + self.processes]) for at in range(0, len(each), self.processes))

    def tokens(self, rows: Sequence[int]) -> int:
        """Return the size of a micro-batch with its padding."""
        return len(rows) * max(self.sizes[row] for row in rows) if self.padded else sum(self.sizes[row] for row in rows)

    def _cost(self, rows: Sequence[int]) -> int:
        return max(FEWEST_TOKENS, self.tokens(rows))

    def _in_one_sequence(self, longest_first: Sequence[int], count: int) -> list[list[int]] | None:
        """Deal rows into so many micro-batches; None if they do not fit.

        The k-th of each process gets one of the longest rows that are left, and is then filled up to the length of the
        longest of these, but at least as far as all others: the next row goes to where most room is left.
        """
        bins = [[row] for row in longest_first[:count]]
        heads = [self.sizes[row] for row in longest_first[:count]]
        heights = _filled(heads[:: self.processes], sum(self.sizes[row] for row in longest_first) / self.processes)
        room = [(head - heights[number // self.processes], number, head) for number, head in enumerate(heads)]
        heapify(room)
        for row in longest_first[count:]:
            while room and room[0][2] + self.sizes[row] > self.most:
                heappop(room)
            if not room:
                return None
            less, number, filled = room[0]
            bins[number].append(row)
            heapreplace(room, (less + self.sizes[row], number, filled + self.sizes[row]))
        return bins

    def _by_length(self, longest_first: Sequence[int], count: int) -> list[list[int]] | None:
        """Cut rows into so many micro-batches of similar lengths, none larger than needed; None if they do not fit."""
        least, most = self.sizes[longest_first[0]], max(self.most, self.sizes[longest_first[0]])
        if len(self._cut(longest_first, self.most)) > count:
            return None
        while least < most:
            middle = (least + most) // 2
            if len(self._cut(longest_first, min(middle, self.most))) > count:
                least = middle + 1
            else:
                most = middle
        bins = self._cut(longest_first, min(most, self.most))
        while len(bins) < count:  # halve the dearest of several rows
            bins.sort(key=lambda rows: (len(rows) > 1, self.tokens(rows)))
            dearest = bins.pop()
            bins += [dearest[: len(dearest) // 2], dearest[len(dearest) // 2 :]]
        return bins

    def _cut(self, longest_first: Sequence[int], most: int) -> list[list[int]]:
        bins: list[list[int]] = [[]]
        for row in longest_first:
            if bins[-1] and self.sizes[bins[-1][0]] * (len(bins[-1]) + 1) > most:
                bins.append([])
            bins[-1].append(row)
        return bins


def _filled(heights: Sequence[int], total: float) -> list[float]:
    """Raise the lowest of some heights, which decrease, to one level, so that their sum is `total`."""
    for fewest in range(len(heights)):
        level = (total - sum(heights[:fewest])) / (len(heights) - fewest)
        if level >= heights[fewest]:
            return [*heights[:fewest], *[level] * (len(heights) - fewest)]
    return list(heights)


@dataclass(frozen=True)
class Plan:
    """The micro-batches of a training. rows_per_step: of all processes. seed: that of ms-swift's sampler."""

    planner: Planner
    rows_per_step: int
    seed: int

    @property
    def rows_per_epoch(self) -> int:
        """Each process takes equally many rows; those left over are the last of the file (ms-swift 4.6, shard.py)."""
        rows = len(self.planner.sizes)
        return rows - rows % self.planner.processes

    @property
    def steps_per_epoch(self) -> int:
        """The last step of an epoch may be smaller."""
        return -(-self.rows_per_epoch // self.rows_per_step)

    def rows(self, epoch: int) -> Iterator[list[int]]:
        """Yield the rows of each step of an epoch, from 0: those that ms-swift's `BatchSamplerShard` draws."""
        import torch  # here: planning needs it for this alone

        generator = torch.Generator()
        generator.manual_seed(self.seed + epoch)
        order: list[int] = torch.randperm(self.rows_per_epoch, generator=generator).tolist()
        return (order[at : at + self.rows_per_step] for at in range(0, len(order), self.rows_per_step))

    def steps(self, epoch: int) -> Iterator[Step]:
        """Yield the planned steps of an epoch, in the order of the training. epoch: from 0; each has its own order."""
        return map(self.planner.step, self.rows(epoch))


def read_sizes(lengths: Path) -> list[int]:
    """Return the sizes of the rows of a lengths file for a `Planner`."""
    from vlmflow.lengths.count import read_lengths  # here: an estimate needs this module's constants without tokenizers

    return [size_of(row) for row in read_lengths(lengths)]


def size_of(row: "RowLength") -> int:
    """Return the size of a row for a `Planner`."""
    return row.text_tokens + round(PICTURE_TOKEN * row.picture_tokens)
