"""A trainer's log: transformers' `log_history` (trainer_callback.py, `TrainerState`), which is in each checkpoint."""

import math
from numbers import Integral, Real
from typing import Any

StepLoss = tuple[int, float]
"""An optimizer step, and the loss there in nats per token."""

STATE = "trainer_state.json"
"""The file of a checkpoint that holds the log."""


def logged(history: list[dict[str, Any]], kind: str) -> list[StepLoss]:
    """Return the losses in a trainer's log. kind: "loss" for training, "eval_loss" for validation.

    An entry whose step or loss is missing or no number counts as not logged: a resumed training evaluates again.
    """
    return [
        (entry["step"], entry[kind])
        for entry in history
        if isinstance(entry.get("step"), Integral) and isinstance(entry.get(kind), Real)
    ]


def evaluated(history: list[dict[str, Any]], step: int) -> bool:
    """Return whether a trainer's log has the validation loss of a step."""
    return any(at == step for at, _ in logged(history, "eval_loss"))


def stalled(history: list[dict[str, Any]], early_stop_after: int | None) -> bool:
    """Return whether the last `early_stop_after` evaluations in a trainer's log gave no new lowest validation loss.

    The log is part of each checkpoint, so a resumed training continues the count. NaN does not count as lower.
    """
    lowest, since = math.inf, 0
    for _, loss in logged(history, "eval_loss"):
        lowest, since = (loss, 0) if loss < lowest else (lowest, since + 1)
    return early_stop_after is not None and since >= early_stop_after
