"""The events that the first rank writes to the run folder (`messages`), and the end of a training that is spoiled.

A run's page and its report are made from the events. A step spoils a training if its loss or its gradient is no number,
or the loss has exploded. The trainers notice it on all ranks at once. They stop before they save anything of that step,
and write an account of it into the run folder (`messages.BadStep`).
"""

import math
import resource
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from vlmflow.core.account import write_account
from vlmflow.in_trainer.batches import Batches
from vlmflow.in_trainer.engine import Ranks, device_name, gather
from vlmflow.in_trainer.messages import (
    BAD_STEP,
    PROGRESS,
    BadStep,
    Begin,
    Doing,
    End,
    Event,
    Fault,
    Heart,
    Log,
    Model,
    Orders,
    StepLoss,
    as_line,
    logged,
)
from vlmflow.swift.model_layers import layers_of

LOGGED = ("loss", "eval_loss", "learning_rate", "grad_norm", "epoch")


IN_A_ROW = 5
"""So many losses in a row must be far too high. One may be: of a step with a single short and wrong answer."""

FACTOR = 3
"""Too high is this many times the usual loss."""

FLOOR = 6.0
"""A lower loss is never too high (nats per token). A language model that is destroyed has at least about 7: the entropy
of single tokens of text; guessing from Qwen3's vocabulary has ln 151,936 = 11.9."""

USUAL = 50
"""The usual loss is the median of so many losses before."""

FEWEST = 10
"""With fewer losses before, nothing is known to be usual."""


class Events(TrainerCallback):
    """Writes the events of a session."""

    def __init__(self, orders: Orders, heart: Heart, trainer: Any, batches: Batches) -> None:
        self._progress = Path(orders.folder, PROGRESS)
        self._heart = heart
        self._trainer = trainer
        self._batches = batches

    def _write(self, event: Event) -> None:
        if self._trainer.args.process_index == 0:
            with self._progress.open("a") as file:
                file.write(as_line(event))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write that the session begins, and what model it trains."""
        args.report_to = []  # TensorBoard's callback is at work; ms-swift would draw its curves as pictures too
        self._begun = time.monotonic()
        step, tokens, mode = state.global_step, int(state.num_input_tokens_seen), args.parallel_mode.name
        self._write(Begin(step, state.max_steps, tokens, args.world_size, mode, device_name(), time.time()))
        self._write(Model(step, layers_of(self._trainer.model)))

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        """Write the values of a step or of an evaluation."""
        values: dict[str, Any] = {key: float(logs[key]) for key in LOGGED if key in logs}
        now, tokens = time.monotonic() - self._begun, int(state.num_input_tokens_seen)
        waited, memory = self._batches.waited, peak_memory()
        self._write(Log(now, state.global_step, state.max_steps, tokens, **values, waited=waited, memory=memory))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write that the session ended by itself, with the memory of all ranks."""
        self._heart.beat(Doing.SAVING)  # ms-swift still writes its own log
        self._write(End(state.global_step, peak_memory=gather(peak_memory())))


def peak_memory() -> int:
    """Return the most memory of this process so far, in bytes: on the GPU, or on a machine without one in all."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_reserved())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def fault_of(losses: Sequence[StepLoss], gradient_is_finite: bool, warmup: int) -> tuple[Fault, int] | None:
    """Return what is wrong with the last step, and the step at which it began; None if nothing is.

    losses: of all steps so far, oldest first. warmup: the steps in which the learning rate rises; their losses may be
    anything finite.

    The loss has exploded if the last IN_A_ROW losses are all above FLOOR and above FACTOR times the median of the USUAL
    ones before them.
    """
    step, loss = losses[-1]
    if not math.isfinite(loss):
        return Fault.LOSS, step
    if not gradient_is_finite:
        return Fault.GRADIENT, step
    before, last = losses[:-IN_A_ROW][-USUAL:], losses[-IN_A_ROW:]
    if len(before) < FEWEST or last[0][0] <= warmup:
        return None
    limit = max(FLOOR, FACTOR * statistics.median(loss for _, loss in before))
    return (Fault.EXPLODED, last[0][0]) if all(loss > limit for _, loss in last) else None


class BadStepError(Exception):
    """A step spoiled the training; raised on all ranks, before anything of it is saved."""


class Faults(TrainerCallback):
    """Looks at the loss and the gradient of each step of a trainer of transformers.

    transformers would log another loss in place of one that is no number (`logging_nan_inf_filter`), and ms-swift would
    skip an update whose gradient is NaN without a word (trainers/mixin.py, `_fix_grad_norm_nan`).
    """

    def __init__(self, orders: Orders, trainer: Any, ranks: Ranks, batches: Batches) -> None:
        trainer.args.logging_nan_inf_filter = False
        self._account = Path(orders.folder, BAD_STEP)
        self._trainer = trainer
        self._batches = batches
        self._ranks = ranks
        ranks.tell["loss"] = self._measure
        self._norm: Any = None
        self._get_grad_norm = trainer._get_grad_norm
        trainer._get_grad_norm = self._noted_norm

    def _noted_norm(self, *arguments: Any, **values: Any) -> Any:
        self._norm = self._get_grad_norm(*arguments, **values)
        return self._norm

    def _measure(self) -> tuple[float, bool]:
        """Return this rank's loss of the present step, and whether the gradient's norm is a finite number.

        With float16 an infinite gradient is usual: the scaler will skip the update and scale less. DeepSpeed skips
        such an update with bfloat16 too, at every step without an end.
        """
        self._of_passes: list[float] = torch.stack(self._batches.losses).tolist()
        norm, self._norm = self._norm, None
        finite = norm is None or math.isfinite(float(norm)) or self._trainer.args.fp16
        return sum(self._of_passes), finite

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Raise BadStepError if the step is bad, before it changes the weights; its account is in the run folder."""
        measured: list[tuple[float, bool]] = self._ranks.told["loss"]
        loss = sum(loss for loss, _ in measured) / len(measured)
        recent = state.log_history[-2 * (USUAL + IN_A_ROW) :]  # at most every second entry is of an evaluation
        step = state.global_step + 1
        losses: list[StepLoss] = [*logged(recent, "loss"), (step, loss)]
        warmup = args.get_warmup_steps(state.max_steps)
        verdict = fault_of(losses, all(finite for _, finite in measured), warmup)
        if verdict is None:
            return
        fault, first = verdict
        rows = self._culprits(gather(self._suspects(fault)), fault)
        if args.process_index == 0:
            of_steps = [f"{loss:.4g}" for step, loss in losses if step >= first]
            account = BadStep(step=step, first=first, fault=fault, losses=of_steps, rows=rows)
            write_account(self._account, account)
        raise BadStepError

    def _suspects(self, fault: Fault) -> list[list[int]]:
        """Return the rows of this rank's forward passes of the step, or of those whose loss is no number."""
        return [
            batch
            for loss, batch in zip(self._of_passes, self._batches.of_step, strict=True)
            if fault is not Fault.LOSS or not math.isfinite(loss)
        ]

    def _culprits(self, of_ranks: list[list[list[int]]], fault: Fault) -> list[int]:
        """Return the rows to name: all suspects, or of passes of several rows those whose own loss is no number.

        All ranks compute equally many losses, because forward passes may be collective.
        """
        rows_of_ranks = [[row for rows in passes for row in rows] for passes in of_ranks]
        everybody = sorted({row for rows in rows_of_ranks for row in rows})
        alone = all(len(rows) == 1 for passes in of_ranks for rows in passes)
        if fault is not Fault.LOSS or alone or self._trainer.template.sequence_parallel_size > 1:
            return everybody
        mine = rows_of_ranks[self._trainer.args.process_index]
        most = max(map(len, rows_of_ranks))
        bad = [row for row in [*mine, *[0] * (most - len(mine))] if not math.isfinite(self._loss_of(row))]
        culprits = sorted({row for rows in gather([row for row in bad if row in mine]) for row in rows})
        return culprits or everybody

    def _loss_of(self, row: int) -> float:
        """Return the loss of a row alone, with the present weights."""
        trainer = self._trainer
        inputs = trainer._prepare_inputs(trainer.data_collator([trainer.train_dataset[row]]))
        with (
            torch.no_grad(),
            trainer.compute_loss_context_manager(),
            trainer.template.forward_context(trainer.model, inputs),
        ):
            return float(trainer.compute_loss(trainer.model_wrapped, inputs))
