"""A step that spoils a training: its loss or its gradient is no number, or the loss has exploded.

The trainers then stop before they save anything of that step, and write an account of it into the run folder. The same
training is not started again while that account is there: it would come to the same step.
"""

import math
import statistics
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path

import msgspec

from vlmflow.in_trainer.history import StepLoss

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
