"""Cuts the rows of an optimizer step into micro-batches: a pure function of lengths and a number of tokens.

The loss of a step does not depend on how its rows are cut, and a GPU waits for Python in each forward pass: with short
rows, few full micro-batches take a fraction of the time of many small ones.

Processes wait for each other in each micro-batch, so each has the same number of them in a step, and the k-th takes as
long as the dearest k-th of any process. The plan minimises their sum. Nothing measured enters, so that each process,
each resume and each machine has the same plan.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from pathlib import Path
from typing import TYPE_CHECKING

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
