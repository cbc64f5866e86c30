"""Finds a step that spoils the training, on all ranks at once."""

import math
from pathlib import Path
from typing import Any

import torch

from vlmflow.core.account import write_account
from vlmflow.in_trainer.bad_step import IN_A_ROW, USUAL, BadStep, Fault, account_of, fault_of
from vlmflow.in_trainer.batches import Batches
from vlmflow.in_trainer.history import StepLoss, logged
from vlmflow.in_trainer.ranks import gather


class BadStepError(Exception):
    """A step spoiled the training; raised on all ranks, before anything of it is saved."""


class Faults:
    """Looks at the loss and the gradient of each step of a trainer of transformers.

    transformers would log another loss in place of one that is no number (`logging_nan_inf_filter`), and ms-swift would
    skip an update whose gradient is NaN without a word (trainers/mixin.py, `_fix_grad_norm_nan`).
    """

    def __init__(self, trainer: Any, args: Any, batches: Batches, run_folder: Path) -> None:
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
        self._of_passes: list[float] = torch.stack(self._batches.losses).tolist()
        norm, self._norm = self._norm, None
        finite = norm is None or math.isfinite(float(norm)) or self._trainer.args.fp16
        return sum(self._of_passes), finite

    def stop_at_a_bad_step(self, measured: list[tuple[float, bool]]) -> None:
        """Raise BadStepError if the present step is bad, with an account of it in the run folder.

        measured: what `measure` returned on each rank. All ranks must call it.
        """
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
        trainer = self._trainer
        inputs = trainer._prepare_inputs(trainer.data_collator([trainer.train_dataset[row]]))
        with (
            torch.no_grad(),
            trainer.compute_loss_context_manager(),
            trainer.template.forward_context(trainer.model, inputs),
        ):
            return float(trainer.compute_loss(trainer.model_wrapped, inputs))
