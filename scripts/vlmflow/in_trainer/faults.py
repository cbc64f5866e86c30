"""A step that spoils a training: its loss or its gradient is no number, or the loss has exploded.

The trainers find it on all ranks at once. They stop before they save anything of that step, and write an account of it
into the run folder. The same training is not started again while that account is there: it would come to the same step.

The supervisor reads the account without torch; so functions of the trainer import it.
"""

import math
import statistics
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from vlmflow.core.account import write_account
from vlmflow.in_trainer.messages import StepLoss, logged

if TYPE_CHECKING:
    from vlmflow.in_trainer.batches import Batches

ACCOUNT = "bad_step.json"
"""The account's file in the run folder."""

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


class Fault(StrEnum):
    """What is wrong with a step."""

    LOSS = "the loss is not a finite number"
    GRADIENT = "the gradient's norm is not a finite number"
    EXPLODED = "the loss has exploded"


class BadStep(msgspec.Struct, frozen=True, kw_only=True):
    """A step that stopped a training (`bad_step.json` in its run folder).

    first: the step at which it began; with an exploded loss, the first of those that are too high. losses: of the steps
    from there on, in nats per token, as texts, since JSON has no NaN. rows: of the step, by their lines in the train
    file, from 0; with a loss that is no number, only those of the forward passes that gave it.
    """

    step: int
    first: int
    fault: Fault
    losses: list[str]
    rows: list[int]


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


def account_of(run_folder: Path) -> Path:
    """Return the place of the account in a run folder."""
    return run_folder / ACCOUNT


class BadStepError(Exception):
    """A step spoiled the training; raised on all ranks, before anything of it is saved."""


class Faults:
    """Looks at the loss and the gradient of each step of a trainer of transformers.

    transformers would log another loss in place of one that is no number (`logging_nan_inf_filter`), and ms-swift would
    skip an update whose gradient is NaN without a word (trainers/mixin.py, `_fix_grad_norm_nan`).
    """

    def __init__(self, trainer: Any, args: Any, batches: "Batches", run_folder: Path) -> None:
        args.logging_nan_inf_filter = False
        self._trainer = trainer
        self._batches = batches
        self._run_folder = run_folder
        self._norm: Any = None
        self._get_grad_norm = trainer._get_grad_norm
        trainer._get_grad_norm = self._noted_norm

    def _noted_norm(self, *arguments: Any, **values: Any) -> Any:
        self._norm = self._get_grad_norm(*arguments, **values)
        return self._norm

    def measure(self) -> tuple[float, bool]:
        """Return this rank's loss of the present step, and whether the gradient's norm is a finite number.

        With float16 an infinite gradient is usual: the scaler will skip the update and scale less. DeepSpeed skips
        such an update with bfloat16 too, at every step without an end.
        """
        import torch

        self._of_passes: list[float] = torch.stack(self._batches.losses).tolist()
        norm, self._norm = self._norm, None
        finite = norm is None or math.isfinite(float(norm)) or self._trainer.args.fp16
        return sum(self._of_passes), finite

    def stop_at_a_bad_step(self, measured: list[tuple[float, bool]]) -> None:
        """Raise BadStepError if the present step is bad, with an account of it in the run folder.

        measured: what `measure` returned on each rank. All ranks must call it.
        """
        from vlmflow.in_trainer.engine import gather

        trainer, state = self._trainer, self._trainer.state
        loss = sum(loss for loss, _ in measured) / len(measured)
        recent = state.log_history[-2 * (USUAL + IN_A_ROW) :]  # at most every second entry is of an evaluation
        step = state.global_step + 1
        losses: list[StepLoss] = [*logged(recent, "loss"), (step, loss)]
        warmup = trainer.args.get_warmup_steps(state.max_steps)
        found = fault_of(losses, all(finite for _, finite in measured), warmup)
        if found is None:
            return
        fault, first = found
        rows = self._culprits(gather(self._suspects(fault)), fault)
        if trainer.args.process_index == 0:
            of_steps = [f"{loss:.4g}" for step, loss in losses if step >= first]
            account = BadStep(step=step, first=first, fault=fault, losses=of_steps, rows=rows)
            write_account(account_of(self._run_folder), account)
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
        from vlmflow.in_trainer.engine import gather

        rows_of_ranks = [[row for rows in passes for row in rows] for passes in of_ranks]
        everybody = sorted({row for rows in rows_of_ranks for row in rows})
        alone = all(len(rows) == 1 for passes in of_ranks for rows in passes)
        if fault is not Fault.LOSS or alone or self._trainer.template.sequence_parallel_size > 1:
            return everybody
        mine = rows_of_ranks[self._trainer.args.process_index]
        most = max(map(len, rows_of_ranks))
        bad = [row for row in [*mine, *[0] * (most - len(mine))] if not math.isfinite(self._loss_of(row))]
        found = sorted({row for rows in gather([row for row in bad if row in mine]) for row in rows})
        return found or everybody

    def _loss_of(self, row: int) -> float:
        """Return the loss of a row alone, with the present weights."""
        import torch

        trainer = self._trainer
        inputs = trainer._prepare_inputs(trainer.data_collator([trainer.train_dataset[row]]))
        with (
            torch.no_grad(),
            trainer.compute_loss_context_manager(),
            trainer.template.forward_context(trainer.model, inputs),
        ):
            return float(trainer.compute_loss(trainer.model_wrapped, inputs))
