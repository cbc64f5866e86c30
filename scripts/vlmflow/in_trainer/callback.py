"""Our callback in ms-swift's trainer.

It
- refuses a training that is not really distributed: it compares the world size at the start, and the ranks' trained
  weights before every checkpoint, if the strategy gives each rank all of them;
- ends the training after a number of evaluations without a lower loss, at the step where it is told to stop, and at a
  step that spoils it (`faults`);
- saves and ends on SIGTERM or when its time is over, also during an evaluation; a resumed training repeats that
  evaluation before its next step;
- trains each step's micro-batches and notes their rows (`batches`), evaluates every row once (`evaluation`), gives
  signs of life (`heartbeat`);
- writes events (`messages`) to the run folder (rank 0).
"""

import dataclasses
import json
import os
import signal
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from swift.callbacks import callbacks_map
from swift.callbacks.base import TrainerCallback

from vlmflow.config.strategies import strategy_of
from vlmflow.config.tuners import tuner_of
from vlmflow.core.files import whole_file
from vlmflow.in_trainer import engine
from vlmflow.in_trainer.batches import Batches, Fixed, keep_trained_columns
from vlmflow.in_trainer.checkpoints import store_digests_with_each_checkpoint, store_logits_with_each_checkpoint
from vlmflow.in_trainer.engine import gather, keep_their_form, peak_memory, refuse_different_weights
from vlmflow.in_trainer.evaluation import Evaluation
from vlmflow.in_trainer.faults import Faults
from vlmflow.in_trainer.heartbeat import Doing, Heart
from vlmflow.in_trainer.messages import (
    STATE,
    Begin,
    End,
    Event,
    Log,
    Model,
    Orders,
    RowLog,
    as_line,
    evaluated,
    stalled,
)
from vlmflow.lengths.count import read_lengths
from vlmflow.lengths.micro_batches import Plan, Planner, read_sizes
from vlmflow.swift.arguments import CALLBACK
from vlmflow.swift.model_layers import layers_of
from vlmflow.swift.row_attention import in_one_sequence

LOGGED = ("loss", "eval_loss", "learning_rate", "grad_norm", "epoch")


class EvaluationCut(Exception):
    """SIGTERM came, or the time was over, during an evaluation; raised on all ranks after the same batch."""


class EndsAtOnce(Exception):
    """The resumed training lacked only its last evaluation, or that evaluation was cut."""


def register(orders: Orders, heart: Heart) -> None:
    """Register our callback with ms-swift under the name that `swift.arguments` passes."""
    callbacks_map[CALLBACK] = partial(Watch, orders, heart)


class Watch(TrainerCallback):
    """The callback of one trainer process; transformers calls its methods `on_…`."""

    def __init__(self, orders: Orders, heart: Heart, args: Any, trainer: Any) -> None:
        super().__init__(args, trainer)
        folder = Path(orders.folder)
        self.orders = orders
        self.strategy = strategy_of(orders.strategy)
        self.heart = heart
        self.sharing = trainer.template.sequence_parallel_size
        """So many neighbouring ranks train on the same rows (ms-swift, sequence_parallel.py, `_init_device_mesh`)."""
        row_log = RowLog(folder, heart.rank) if heart.rank % self.sharing == 0 else None
        how, val = _batches(orders)
        self.batches = Batches(trainer, heart, how, row_log)
        self.faults = Faults(trainer, args, self.batches, folder)
        self.terminated = False
        self.trainer = trainer
        self.log_save_evaluate = trainer._maybe_log_save_evaluate
        trainer._maybe_log_save_evaluate = self._log_save_evaluate
        self.save_checkpoint = trainer._save_checkpoint
        trainer._save_checkpoint = self._save_checkpoint
        Evaluation(trainer, heart, val)
        signal.signal(signal.SIGTERM, self._on_sigterm)

    def _on_sigterm(self, number: int, frame: Any) -> None:
        self.terminated = True

    @property
    def stop(self) -> bool:
        """Whether this rank must save and end."""
        over = self.orders.seconds is not None and self.heart.age > self.orders.seconds
        return self.terminated or over

    def _write(self, event: Event) -> None:
        if self.args.process_index == 0:
            with self.orders.progress.open("a") as file:
                file.write(as_line(event))

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Put our callback last, so that the others have started when it evaluates in on_train_begin."""
        engine.prepare(self.strategy, self.trainer)
        if self.orders.micro_batches:
            join = keep_trained_columns if self.orders.micro_batches.padded else in_one_sequence
            join(self.trainer)
        if not tuner_of(self.orders.tuner).trains_adapter:
            store_logits_with_each_checkpoint(self.trainer)
        store_digests_with_each_checkpoint(self.trainer)
        handler = self.trainer.callback_handler
        handler.callbacks = [*(other for other in handler.callbacks if other is not self), self]

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse processes that do not train together; evaluate a resumed checkpoint that was not."""
        mode, processes = args.parallel_mode.name, self.orders.processes
        if args.world_size != processes or (processes > 1 and mode != "DISTRIBUTED"):
            raise RuntimeError(f"not really distributed: world size {args.world_size} of {processes}, mode {mode}")
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        if processes > int(os.environ["LOCAL_WORLD_SIZE"]) and len(products := set(gather(device))) > 1:
            raise RuntimeError(f"not the same GPUs on all nodes: {', '.join(sorted(products))}")
        engine.begin(self.strategy, self.trainer)
        args.report_to = []  # TensorBoard's callback is at work; ms-swift would draw its curves as pictures too
        self.begun = time.monotonic()
        tokens = int(state.num_input_tokens_seen)
        self._write(Begin(state.global_step, state.max_steps, tokens, args.world_size, mode, device, time.time()))
        keep_their_form(self.trainer.model)
        self._write(Model(state.global_step, layers_of(self.trainer.model)))
        if state.global_step and self._lacks_evaluation(args, state):
            self._evaluate_now(args, state, control)

    def _lacks_evaluation(self, args: Any, state: Any) -> bool:
        due = state.global_step % args.eval_steps == 0 or state.global_step >= state.max_steps
        return due and not evaluated(state.log_history, state.global_step)

    def _evaluate_now(self, args: Any, state: Any, control: Any) -> None:
        """Evaluate the resumed checkpoint, as transformers does before it saves."""
        with suppress(EvaluationCut):
            self.trainer._determine_best_metric(self.trainer._evaluate(None, None), None)
            folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
            if state.best_global_step == state.global_step:
                state.best_model_checkpoint = str(folder)
            if args.process_index == 0:
                with whole_file(folder / STATE) as file:
                    file.write((json.dumps(dataclasses.asdict(state), indent=2, sort_keys=True) + "\n").encode())
            if state.global_step < state.max_steps and not self._ends_here(state):
                return
        self.on_train_end(args, state, control)
        raise EndsAtOnce

    def _ends_here(self, state: Any) -> bool:
        """Return whether the training ends at its present step, which is evaluated, before its last one."""
        at_stop = self.orders.stop_at is not None and state.global_step >= self.orders.stop_at
        return at_stop or stalled(state.log_history, self.orders.early_stop_after)

    def _log_save_evaluate(self, *arguments: Any, **values: Any) -> None:
        """Evaluate and save as transformers does; if the evaluation is cut, only save."""
        try:
            self.log_save_evaluate(*arguments, **values)
        except EvaluationCut:
            control = self.trainer.control
            control.should_log = control.should_evaluate = False
            control.should_save = control.should_training_stop = True
            self.log_save_evaluate(*arguments, **values)

    def _save_checkpoint(self, *arguments: Any, **values: Any) -> None:
        """Save as transformers does; it may take longer than a step."""
        self.heart.beat(Doing.SAVING)
        self.save_checkpoint(*arguments, **values)
        self.heart.beat(Doing.TRAINING)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Cut the evaluation on all ranks after the same batch, if one of them must end."""
        if any(gather(self.stop)):
            raise EvaluationCut

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End where the training is told to stop, or early, if validation loss stopped falling."""
        if self._ends_here(state):
            control.should_training_stop = True

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Let all ranks know of each other; end at a bad step, before it changes the weights."""
        self.votes = gather((self.stop, self.faults.measure(), self.batches.tokens_of_step()))
        self.faults.stop_at_a_bad_step([measured for _, measured, _ in self.votes])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count the step's tokens; save and end on all ranks if one of them must."""
        state.num_input_tokens_seen += sum(tokens for _, _, tokens in self.votes) // self.sharing
        if any(stop for stop, _, _ in self.votes):
            control.should_evaluate = False
            control.should_save = True
            control.should_training_stop = True
        if control.should_save and self.strategy.compares_ranks:
            refuse_different_weights(kwargs["model"])

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        """Write the values of a step or of an evaluation."""
        values: dict[str, Any] = {key: float(logs[key]) for key in LOGGED if key in logs}
        now, tokens = time.monotonic() - self.begun, int(state.num_input_tokens_seen)
        waited, memory = self.batches.waited, peak_memory()
        self._write(Log(now, state.global_step, state.max_steps, tokens, **values, waited=waited, memory=memory))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write that the session ended by itself, with the memory of all ranks."""
        self.heart.beat(Doing.SAVING)  # ms-swift still writes its own log
        self._write(End(state.global_step, peak_memory=gather(peak_memory())))


def _batches(orders: Orders) -> tuple[Plan | Fixed, Planner | None]:
    """Return which rows are in a batch of the training; and a planner for the val split, if they are planned."""
    asked = orders.micro_batches
    if asked is None:
        lengths = orders.group_by_length and [row.tokens for row in read_lengths(Path(orders.group_by_length))]
        return Fixed(orders.batches_per_step, lengths or None), None
    train, val = (
        Planner(read_sizes(Path(lengths)), orders.processes, asked.tokens, asked.padded)
        for lengths in (asked.train, asked.val)
    )
    return Plan(train, asked.rows_per_step, asked.seed), val
