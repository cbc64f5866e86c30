"""The events that the first rank writes to the run folder (`messages`), from which its page and its report are made."""

import resource
import time
from typing import Any

import torch
from transformers import TrainerCallback

from vlmflow.in_trainer.batches import Batches
from vlmflow.in_trainer.engine import device_name, gather
from vlmflow.in_trainer.heartbeat import Doing, Heart
from vlmflow.in_trainer.messages import Begin, End, Event, Log, Model, Orders, as_line
from vlmflow.swift.model_layers import layers_of

LOGGED = ("loss", "eval_loss", "learning_rate", "grad_norm", "epoch")


class Events(TrainerCallback):
    """Writes the events of a session."""

    def __init__(self, orders: Orders, heart: Heart, trainer: Any, batches: Batches) -> None:
        self._progress = orders.progress
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
        on_gpu: int = torch.cuda.max_memory_reserved()
        return on_gpu
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
