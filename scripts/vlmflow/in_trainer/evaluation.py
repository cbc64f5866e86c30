"""The validation loss: Σ NLL / Σ trained tokens over all rows of the val split.

transformers 5.19 averages global batches with equal weight, and accelerate repeats rows to fill the last ones; so its
loss depends on the number of processes and on the batch size. This one does not. Sums are in float64.

A training that was cut or killed before an evaluation was over makes up for it when it is resumed, before its next
step.
"""

import dataclasses
import json
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from swift.dataloader import DataLoaderShard
from swift.sequence_parallel import sequence_parallel
from transformers import TrainerCallback

from vlmflow.core.files import whole_file
from vlmflow.in_trainer.batches import IGNORED, planner_of
from vlmflow.in_trainer.checkpoints import EvaluationCut, Stop
from vlmflow.in_trainer.events import Events
from vlmflow.in_trainer.messages import STATE, Doing, Heart, Orders, evaluated


class EndsAtOnce(Exception):
    """The resumed training lacked only its last evaluation, or that evaluation was cut."""


class Evaluation(TrainerCallback):
    """Takes the place of a trainer's own evaluation; the trainer's loop and its logs stay.

    trainer: ms-swift's (swift/trainers/seq2seq_trainer.py). An evaluation also logs `eval_rows` and `eval_tokens`.
    """

    def __init__(self, orders: Orders, heart: Heart, trainer: Any, stop: Stop, events: Events) -> None:
        batches = orders.micro_batches
        self._planner = batches and planner_of(batches, batches.val, orders.processes)
        self._heart = heart
        self._trainer = trainer
        self._stop = stop
        self._events = events
        self._loader: DataLoaderShard | None = None
        self._evaluate = trainer._evaluate
        self._loop = trainer.evaluation_loop
        self._step = trainer.prediction_step
        trainer._evaluate = self._without_random_numbers
        trainer.evaluation_loop = self._evaluation_loop
        trainer.prediction_step = self._prediction_step
        trainer.get_eval_dataloader = self._get_eval_dataloader

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Evaluate a resumed checkpoint that was not, as transformers does before it saves.

        Raises EndsAtOnce if nothing is left to train, or the evaluation is cut.
        """
        step = state.global_step
        due = step % args.eval_steps == 0 or step >= state.max_steps
        if not step or not due or evaluated(state.log_history, step):
            return
        with suppress(EvaluationCut):
            self._trainer._determine_best_metric(self._trainer._evaluate(None, None), None)
            folder = Path(args.output_dir, f"checkpoint-{step}")
            if state.best_global_step == step:
                state.best_model_checkpoint = str(folder)
            if args.process_index == 0:
                with whole_file(folder / STATE) as file:
                    file.write((json.dumps(dataclasses.asdict(state), indent=2, sort_keys=True) + "\n").encode())
            if step < state.max_steps and not self._stop.ends_here(state):
                return
        self._events.on_train_end(args, state, control)
        raise EndsAtOnce

    def _without_random_numbers(self, *arguments: Any, **values: Any) -> Any:
        """Evaluate, but draw no random numbers from the training's.

        Each start of a loader draws one. A checkpoint that SIGTERM saved before its evaluation would otherwise be
        resumed with other dropout than an unbroken training has.
        """
        with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else []):
            return self._evaluate(*arguments, **values)

    def _get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoaderShard:
        """Return the one loader of all evaluations, made as ms-swift makes that of the training."""
        trainer, args = self._trainer, self._trainer.args
        if self._loader is None:
            rank, ranks = _place(trainer)
            batches = EvenBatches(self._batches(ranks), rank)
            self._loader = DataLoaderShard(
                trainer.eval_dataset,
                device=trainer.accelerator.device,
                batch_sampler=batches,
                collate_fn=trainer.data_collator,
                num_workers=args.dataloader_num_workers,
                pin_memory=args.dataloader_pin_memory,
                persistent_workers=args.dataloader_persistent_workers,
                prefetch_factor=args.dataloader_prefetch_factor,
                **trainer._maybe_multiprocessing_context(args),
            )
        return self._loader

    def _batches(self, ranks: int) -> list[list[list[int]]]:
        """Return the batches of each rank, each row once."""
        rows = range(len(self._trainer.eval_dataset))
        if self._planner:
            return self._planner.step(rows)
        return dealt(rows, self._trainer.args.eval_batch_size, ranks)

    def _evaluation_loop(self, dataloader: DataLoaderShard, *arguments: Any, **values: Any) -> Any:
        """Evaluate all batches; replace the loss by that of all tokens."""
        trainer = self._trainer
        self._own = dataloader.batch_sampler.own
        self._sum = torch.zeros(2, dtype=torch.float64, device=trainer.args.device)  # NLL in nats, trained tokens
        # A batch's mean loss over its tokens, and not its share of all ranks' batches: seq2seq_trainer.py would
        # multiply by the number of processes, and each batch sets its own count.
        with (
            patch.object(trainer, "model_accepts_loss_kwargs", False),
            patch.object(trainer, "_get_num_items_in_batch", trainer._get_num_items_in_batch),
        ):
            output = self._loop(dataloader, *arguments, **values)
        if dist.is_initialized():
            dist.all_reduce(self._sum)
        # The ranks that share a row by sequence parallelism each added all of it.
        nll, tokens = (self._sum / trainer.template.sequence_parallel_size).tolist()
        output.metrics["eval_loss"] = nll / tokens if tokens else float("nan")
        output.metrics["eval_rows"] = len(trainer.eval_dataset)
        output.metrics["eval_tokens"] = round(tokens)
        return output

    def _prediction_step(self, model: Any, inputs: Any, *arguments: Any, **values: Any) -> Any:
        """Compute a batch as ms-swift does, and add its loss; a repeated batch adds nothing."""
        trainer = self._trainer
        self._heart.beat(Doing.EVALUATING)
        self._own -= 1
        if self._own < 0:
            # It stays out of ms-swift's own figures, such as the share of right tokens.
            factory = trainer.custom_metrics["eval"].default_factory
            with patch.dict(trainer.custom_metrics, {"eval": defaultdict(factory)}):
                return self._step(model, inputs, *arguments, **values)
        # A model predicts no first token. Counted now: ms-swift cuts labels without training, or shares them out.
        tokens = int((inputs["labels"][..., 1:] != IGNORED).sum())
        trainer._get_num_items_in_batch = lambda *_: torch.tensor(max(1, tokens), device=trainer.args.device)
        loss, logits, labels = self._step(model, inputs, *arguments, **values)
        if tokens:
            self._sum += torch.stack([loss.double() * tokens, loss.new_tensor(tokens, dtype=torch.float64)])
        return loss, logits, labels


def dealt(rows: range, size: int, ranks: int) -> list[list[list[int]]]:
    """Deal rows to ranks, one by one; return the batches of each, of `size` rows."""
    of_ranks = [rows[rank::ranks] for rank in range(ranks)]
    return [[list(mine[at : at + size]) for at in range(0, len(mine), size)] for mine in of_ranks]


class EvenBatches(list[list[int]]):
    """The batches of one rank; as many on each, because forward passes may be collective.

    own: how many come first that are the rank's own; then it repeats its first one, or row 0.
    """

    def __init__(self, of_ranks: list[list[list[int]]], rank: int) -> None:
        self.own = len(of_ranks[rank])
        again = of_ranks[rank][0] if self.own else [0]
        super().__init__(of_ranks[rank] + [again] * (max(map(len, of_ranks)) - self.own))


def _place(trainer: Any) -> tuple[int, int]:
    """Return which part of the rows this process evaluates, and of how many parts."""
    if trainer.template.sequence_parallel_size > 1:
        return sequence_parallel.dp_rank, sequence_parallel.dp_world_size
    return trainer.args.process_index, trainer.args.world_size
