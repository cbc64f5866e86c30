"""Finds a step that spoils the training, on all ranks at once."""

import math
from pathlib import Path
from typing import Any

import torch

from vlmflow.core.account import write_account
from vlmflow.trainer.bad_step import IN_A_ROW, USUAL, BadStep, Fault, account_of, fault_of
from vlmflow.trainer.batches import Batches
from vlmflow.trainer.history import StepLoss, logged
from vlmflow.trainer.ranks import gather


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
        self._losses: list[torch.Tensor] = []
        self._norm: Any = None
        self._training_step = trainer.training_step
        trainer.training_step = self._noted_step
        self._get_grad_norm = trainer._get_grad_norm
        trainer._get_grad_norm = self._noted_norm

    def _noted_step(self, *arguments: Any, **values: Any) -> torch.Tensor:
        loss: torch.Tensor = self._training_step(*arguments, **values)
        self._losses.append(loss)
        return loss

    def _noted_norm(self, *arguments: Any, **values: Any) -> Any:
        self._norm = self._get_grad_norm(*arguments, **values)
        return self._norm

    def measure(self) -> tuple[float, bool]:
        """Return this rank's loss of the step that ends now, and whether the gradient's norm is a finite number.

        With float16 an infinite gradient is usual: the scaler then skips the update and scales less. DeepSpeed skips
        such an update with bfloat16 too, at every step without an end.
        """
        losses, self._losses = self._losses, []
        self._of_passes: list[float] = torch.stack(losses).tolist()
        norm, self._norm = self._norm, None
        scaled = self._trainer.args.fp16 and self._trainer.accelerator.optimizer_step_was_skipped
        finite = norm is None or math.isfinite(float(norm)) or scaled
        return sum(self._of_passes), finite

    def stop_at_a_bad_step(self, measured: list[tuple[float, bool]]) -> None:
        """Raise BadStepError if the step that ends now is bad, with an account of it in the run folder.

        measured: what `measure` returned on each rank. All ranks must call it.
        """
        trainer, state = self._trainer, self._trainer.state
        loss = sum(loss for loss, _ in measured) / len(measured)
        recent = state.log_history[-2 * (USUAL + IN_A_ROW) :]  # at most every second entry is of an evaluation
        losses: list[StepLoss] = [*logged(recent, "loss"), (state.global_step, loss)]
        warmup = trainer.args.get_warmup_steps(state.max_steps)
        found = fault_of(losses, all(finite for _, finite in measured), warmup)
        if found is None:
            return
        fault, first = found
        rows = sorted({row for of_rank in gather(self._suspects(fault)) for row in of_rank})
        if trainer.args.process_index == 0:
            of_steps = [f"{loss:.4g}" for step, loss in losses if step >= first]
            account = BadStep(step=state.global_step, first=first, fault=fault, losses=of_steps, rows=rows)
            write_account(account_of(self._run_folder), account)
        raise BadStepError

    def _suspects(self, fault: Fault) -> list[int]:
        """Return this rank's rows of the step, or those of the forward passes whose loss is no number."""
        return [
            row
            for loss, batch in zip(self._of_passes, self._batches.of_step, strict=True)
            if fault is not Fault.LOSS or not math.isfinite(loss)
            for row in batch
        ]
