"""When a training ends before its last step, with a checkpoint.

It does so on SIGTERM or when its time is over, at the step where it is told to stop, and after a number of evaluations
without a lower loss. SIGTERM and the end of its time also cut an evaluation; `evaluation` makes up for it.
"""

import signal
from typing import Any

from transformers import TrainerCallback

from vlmflow.in_trainer.engine import Ranks, gather
from vlmflow.in_trainer.heartbeat import Heart
from vlmflow.in_trainer.messages import Orders, stalled


class EvaluationCut(Exception):
    """SIGTERM came, or the time was over, during an evaluation; raised on all ranks after the same batch."""


class Stop(TrainerCallback):
    """Ends the training of all ranks after the same step."""

    def __init__(self, orders: Orders, heart: Heart, trainer: Any, ranks: Ranks) -> None:
        self._orders = orders
        self._heart = heart
        self._trainer = trainer
        self._ranks = ranks
        ranks.tell["stop"] = self._must_end
        self._terminated = False
        signal.signal(signal.SIGTERM, self._on_sigterm)
        self._log_save_evaluate = trainer._maybe_log_save_evaluate
        trainer._maybe_log_save_evaluate = self._log_save_evaluate_or_cut

    def _on_sigterm(self, number: int, frame: Any) -> None:
        self._terminated = True

    def _must_end(self) -> bool:
        """Return whether this rank must save and end."""
        over = self._orders.seconds is not None and self._heart.age > self._orders.seconds
        return self._terminated or over

    def ends_here(self, state: Any) -> bool:
        """Return whether the training ends at its present step, which is evaluated, before its last one."""
        at_stop = self._orders.stop_at is not None and state.global_step >= self._orders.stop_at
        return at_stop or stalled(state.log_history, self._orders.early_stop_after)

    def _log_save_evaluate_or_cut(self, *arguments: Any, **values: Any) -> None:
        """Evaluate and save as transformers does; if the evaluation is cut, only save."""
        try:
            self._log_save_evaluate(*arguments, **values)
        except EvaluationCut:
            control = self._trainer.control
            control.should_log = control.should_evaluate = False
            control.should_save = control.should_training_stop = True
            self._log_save_evaluate(*arguments, **values)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Cut the evaluation on all ranks after the same batch, if one of them must end."""
        if any(gather(self._must_end())):
            raise EvaluationCut

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save and end on all ranks if one of them must."""
        if any(self._ranks.told["stop"]):
            control.should_evaluate = False
            control.should_save = True
            control.should_training_stop = True

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End where the training is told to stop, or early, if validation loss stopped falling."""
        if self.ends_here(state):
            control.should_training_stop = True
