"""The optimizer steps of a trainer: the micro-batches of each, with their rows, tokens and losses.

transformers sees one batch a step, which is a list of micro-batches; this rank trains them one by one. So their number
may differ from step to step: transformers cuts an epoch into steps by a constant (5.19, trainer.py, `_run_epoch`).
"""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedType
from swift.dataloader import BatchSamplerShard
from torch.nn.functional import pad
from transformers import TrainerCallback

from vlmflow.in_trainer.engine import Ranks
from vlmflow.in_trainer.messages import Batch, Doing, Heart, MicroBatches, Orders, RowLog
from vlmflow.lengths.count import read_lengths
from vlmflow.lengths.steps import Plan, Planner, read_sizes
from vlmflow.swift.row_attention import in_one_sequence

IGNORED = -100
"""The label of a token that is not trained (torch.nn.CrossEntropyLoss, ignore_index)."""


@dataclass(frozen=True)
class Fixed:
    """Batches of a fixed number of rows.

    each: the batches of a step. lengths: tokens of each row, if the rows of a batch are to be of similar length.
    """

    each: int
    lengths: list[int] | None = None

    def steps(self, sampler: Any) -> "GroupedSteps":
        """Return the steps of ms-swift's sampler, or of one that groups by our lengths: its own would read all rows."""
        if self.lengths is not None:
            sampler = BatchSamplerShard(
                len(self.lengths),
                sampler.batch_size,
                shuffle=True,
                drop_last=False,
                data_seed=sampler.base_seed,
                group_by_length=True,
                lengths=self.lengths,
            )
        return GroupedSteps(sampler, self.each)


class Batches(TrainerCallback):
    """Trains the micro-batches of each step of a trainer of transformers, on each rank, and notes them.

    A loader's workers fetch batches ahead, so its sampler has handed out more than was trained. Batches come in the
    sampler's order; so the next step that the trainer takes is the oldest that was handed out.
    """

    def __init__(self, orders: Orders, heart: Heart, trainer: Any, ranks: Ranks) -> None:
        """Train and note batches from now on."""
        self.waited = 0.0
        """Seconds of this session in which the trainer waited for its next batch."""
        self.of_step: list[Batch] = []
        """The rows of the present step's micro-batches."""
        self.losses: list[torch.Tensor] = []
        """The losses of those that were trained; their sum is that of the step."""
        self._tokens: list[torch.Tensor | int] = []
        self._trainer = trainer
        self._heart = heart
        self._how = _how(orders)
        self._sharing = trainer.template.sequence_parallel_size
        """So many neighbouring ranks train on the same rows (ms-swift, sequence_parallel.py, `_init_device_mesh`)."""
        self._log = RowLog(Path(orders.folder), heart.rank) if heart.rank % self._sharing == 0 else None
        self._ranks = ranks
        ranks.tell["tokens"] = self.tokens_of_step
        if orders.micro_batches:
            join = keep_trained_columns if orders.micro_batches.padded else in_one_sequence
            join(trainer)
        self._ahead: deque[list[list[int]]] = deque()
        self._get_loader = trainer.get_train_dataloader
        trainer.get_train_dataloader = self._get_train_dataloader
        self._get_samples = trainer.get_batch_samples
        trainer.get_batch_samples = self._get_batch_samples
        self._train = trainer.training_step
        trainer.training_step = self._training_step
        self._operations = trainer.floating_point_ops
        trainer.floating_point_ops = lambda step: sum(map(self._operations, step))

    def _get_train_dataloader(self, skip_batches: int = 0) -> Any:
        """Return ms-swift's loader, whose length is now in steps. skip_batches: steps that were trained before."""
        loader = self._get_loader()
        how = self._how
        steps = PlannedSteps(how, self._heart.rank) if isinstance(how, Plan) else how.steps(loader.batch_sampler)
        # torch forbids another sampler, because the loader's batch size would differ; nobody asks this loader for it.
        object.__setattr__(loader, "batch_sampler", StepSampler(steps, skip_batches, self._ahead))
        # The start of a loader draws a random number. With workers an unbroken training starts one for all epochs; a
        # resumed one starts another for the rest of its first epoch, and its dropout would differ.
        if loader.persistent_workers and self._trainer.args.resume_from_checkpoint:
            loader.generator = torch.Generator().manual_seed(self._trainer.args.seed)
        return loader

    def _get_batch_samples(self, batches: Iterator[Any], count: int, *arguments: Any) -> Any:
        """Take the micro-batches of the next step, as transformers takes batches, and note their rows.

        Returns them as the one batch of the step, with the number of trained tokens of all ranks.
        """
        timed = self._timed(batches)
        begun = list(islice(timed, 1))
        self.of_step = self._ahead.popleft() if begun else []
        taken, trained_tokens = self._get_samples(chain(begun, timed), len(self.of_step), *arguments)
        # Otherwise the loss of each batch would be a mean, and that of the step a sum of means.
        if taken and trained_tokens is None and isinstance(self._how, Plan):
            raise RuntimeError("the loss is no mean over the trained tokens of a step: batches have no weight in it")
        self._tokens = [_tokens_of(batch) for batch in taken]
        if taken and self._log:
            self._log.write(self._trainer.state.global_step + 1, self.of_step)
        return [taken] if taken else [], trained_tokens

    def _training_step(self, model: Any, step: list[Any], *arguments: Any) -> torch.Tensor:
        """Train the micro-batches of a step; only the last one lets the ranks exchange their gradients."""
        trainer, accelerator = self._trainer, self._trainer.accelerator
        trainer.current_gradient_accumulation_steps = len(step)
        in_deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED  # it follows `sync_gradients`
        self.losses = []
        for number, batch in enumerate(step, start=1):
            self._heart.beat(Doing.TRAINING)
            last = number == len(step)
            accelerator.gradient_state._set_sync_gradients(last)
            with nullcontext() if last or in_deepspeed else accelerator.no_sync(model):
                self.losses.append(self._train(model, batch, *arguments))
        return sum(self.losses[1:], start=self.losses[0])

    def tokens_of_step(self) -> int:
        """Return the tokens of this rank in the present step, without padding.

        transformers can count them too (`include_num_input_tokens_seen`), but then all ranks wait for each other in
        each forward pass (trainer.py, `_track_num_input_tokens`).
        """
        return int(sum(self._tokens))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count the step's tokens."""
        state.num_input_tokens_seen += sum(self._ranks.told["tokens"]) // self._sharing

    def _timed(self, batches: Iterator[Any]) -> Iterator[Any]:
        while True:
            begun = time.monotonic()
            try:
                batch = next(batches)
            except StopIteration:
                return
            finally:
                self.waited += time.monotonic() - begun
            yield batch


def planner_of(settings: MicroBatches, lengths: str, processes: int) -> Planner:
    """Return the planner for the rows of a lengths file."""
    return Planner(read_sizes(Path(lengths)), processes, settings.tokens, settings.padded)


def _how(orders: Orders) -> Plan | Fixed:
    """Return which rows are in a batch."""
    if batches := orders.micro_batches:
        return Plan(planner_of(batches, batches.train, orders.processes), batches.rows_per_step, batches.seed)
    lengths = orders.group_by_length and [row.tokens for row in read_lengths(Path(orders.group_by_length))]
    return Fixed(orders.batches_per_step, lengths or None)


def _tokens_of(batch: dict[str, Any]) -> torch.Tensor | int:
    """Return the number of a batch's tokens; a tensor, so that the GPU is not waited for. Without padding, no mask."""
    mask = batch.get("attention_mask")
    return batch["input_ids"].numel() if mask is None else mask.sum()


class StepSampler:
    """A loader's batch sampler that hands out the micro-batches of steps, and notes which of them are a step.

    Its length is in steps.
    """

    def __init__(self, steps: Any, skipped: int, ahead: deque[list[list[int]]]) -> None:
        """steps: an iterable of steps. skipped: those not to hand out. ahead: gets the batches of each step."""
        self._steps = steps
        self._skipped = skipped
        self._ahead = ahead

    def __iter__(self) -> Iterator[list[int]]:
        self._ahead.clear()
        for step in islice(self._steps, self._skipped, None):
            self._ahead.append(step)
            yield from step

    def __len__(self) -> int:
        return max(0, len(self._steps) - self._skipped)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the steps, such as set_epoch, for ms-swift and transformers."""
        return getattr(self._steps, name)


class GroupedSteps:
    """Steps of equally many batches of a sampler; the last one may have fewer.

    With lengths, ms-swift's sampler gives the first ranks a row more than others. A batch of it alone is left out:
    forward passes may be collective.
    """

    def __init__(self, sampler: Any, size: int) -> None:
        self._sampler = sampler
        self._size = size

    def __iter__(self) -> Iterator[list[list[int]]]:
        batches = islice(self._sampler, len(self._sampler))
        while step := list(islice(batches, self._size)):
            yield step

    def __len__(self) -> int:
        return -(-len(self._sampler) // self._size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)


class PlannedSteps:
    """The steps of one rank as planned; all ranks together take the rows that `GroupedSteps` would take."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self._plan = plan
        self._rank = rank
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of an epoch, from 0."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[list[int]]]:
        return (step[self._rank] for step in self._plan.steps(self.epoch))

    def __len__(self) -> int:
        return self._plan.steps_per_epoch


def keep_trained_columns(trainer: Any) -> None:
    """Let ms-swift's trainer keep logits where a row of the batch is trained, from now on.

    With several rows it keeps all columns from the first trained one on (4.6, trainers/mixin.py): four times as many
    for rows of FIRE.
    """
    trainer.prepare_logits_to_keep = partial(_prepare, trainer.prepare_logits_to_keep)


def _prepare(plain: Any, inputs: dict[str, Any]) -> None:
    """Do for several rows what ms-swift does for one. inputs: labels and loss_scale are rows × tokens."""
    labels: torch.Tensor = inputs["labels"]
    if labels.shape[0] == 1:
        plain(inputs)
        return
    trained = (labels != IGNORED).any(dim=0)
    inputs["labels"] = pad(labels[:, trained], (1, 0), value=IGNORED)
    if inputs.get("loss_scale") is not None:
        inputs["loss_scale"] = pad(inputs["loss_scale"][:, trained], (1, 0), value=0)
    inputs["logits_to_keep"] = pad(trained[1:], (0, 1), value=True)
