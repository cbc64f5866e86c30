"""What a training is doing, from its events and its checkpoints."""

from pathlib import Path
from typing import Literal

from vlmflow.config.run_settings import TrainSettings
from vlmflow.in_trainer.history import STATE, stalled
from vlmflow.supervisor.newest import Newest

Doing = Literal["starting", "training", "evaluating", "saving", "ended", "interrupted"]
"""ended: at its last step, or early by validation loss. interrupted: before that; the same command resumes it."""


def doing(newest: Newest, settings: TrainSettings, output: Path, runs: bool, begun: bool = True) -> Doing:
    """Return what a training is doing.

    newest: its newest figures. settings: the run's. output: the folder of its checkpoints. runs: whether trainers run;
    begun: whether these have written an event.
    """
    if not runs:
        return "ended" if is_over(newest, settings) else "interrupted"
    if not begun:
        return "starting"
    if newest.ended:
        return "saving"
    step = newest.step
    last = step >= newest.target
    if step and step not in newest.eval_losses and (last or step % settings.evaluate_every == 0):
        return "evaluating"
    saves = step and (last or step % settings.save_every == 0)
    if saves and not (output / f"checkpoint-{step}" / STATE).is_file():  # transformers writes this file last
        return "saving"
    return "training"


def is_over(newest: Newest, settings: TrainSettings) -> bool:
    """Return whether a training reached its last evaluation, or ended early because validation loss stopped falling."""
    history = [{"step": step, "eval_loss": loss} for step, loss in sorted(newest.eval_losses.items())]
    at_target = newest.step >= newest.target and newest.step in newest.eval_losses
    return at_target or stalled(history, settings.early_stop_after)
