"""When a training ends before its last step, and what a trainer stores with each checkpoint besides ms-swift's files.

It ends on SIGTERM or when its time is over, at the step where it is told to stop, and after a number of evaluations
without a lower loss; each time with a checkpoint. SIGTERM and the end of its time also cut an evaluation; `evaluation`
makes up for it. Stored are

- the SHA-256 of the files that it may release, so that later damage is noticed. safetensors files have no checksum:
  blocks of zeros after a crash of the machine, or a flipped bit, read as weights;
- a digest of each other file that a training resumes from, since another checkpoint's optimizer loads as well;
- of the model's own weights, which tensors were trained, and some rows with their logits. They let the proof show that
  the published folder answers as the model did in the trainer, without trusting what saved or rewrote the weights.
"""

import signal
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_PREFIX
from transformers import TrainerCallback
from transformers.core_model_loading import revert_weight_conversion

from vlmflow.config.strategies import ADAPTER_CONFIG, MODEL_INDEX, strategy_of, tuner_of
from vlmflow.core.account import read_account, write_account
from vlmflow.core.files import records_digest, sha256_of
from vlmflow.in_trainer.engine import Ranks, gather, refuse_different_weights
from vlmflow.in_trainer.messages import (
    DIGESTS,
    LOGITS,
    POSITIONS,
    TRAINED,
    Doing,
    Heart,
    Orders,
    SavedDigests,
    TrainedTensors,
    stalled,
)
from vlmflow.swift.row_attention import NOT_INPUTS, row_tensors

ROWS = 8
"""The most rows that are stored with their logits."""

PATTERNS = ("*.safetensors", ADAPTER_CONFIG, MODEL_INDEX, TRAINED)
"""The files of a checkpoint that have a digest: no training changes them after it saved them."""


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
        return self._terminated or self._heart.is_over

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


class Checkpoints(TrainerCallback):
    """Compares the ranks before each checkpoint, and writes our files with it."""

    def __init__(self, orders: Orders, heart: Heart, trainer: Any) -> None:
        self._compares_ranks = strategy_of(orders.strategy).compares_ranks
        self._heart = heart
        if not tuner_of(orders.tuner).trains_adapter:
            trainer.save_model = partial(_save_with_logits, trainer, trainer.save_model)
        trainer.save_model = partial(_save_with_digests, trainer, trainer.save_model)
        trainer._save_rng_state = partial(_save_states_with_digests, trainer, trainer._save_rng_state)
        self._save_checkpoint = trainer._save_checkpoint
        trainer._save_checkpoint = self._save_checkpoint_alive

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse ranks that do not train together, if the strategy gives each of them all trained weights."""
        if control.should_save and self._compares_ranks:
            refuse_different_weights(kwargs["model"])

    def _save_checkpoint_alive(self, *arguments: Any, **values: Any) -> None:
        """Save as transformers does; it may take longer than a step."""
        self._heart.beat(Doing.SAVING)
        self._save_checkpoint(*arguments, **values)
        self._heart.beat(Doing.TRAINING)


def _save_with_digests(trainer: Any, save: Any, folder: str | None = None, **values: Any) -> None:
    """Save the model as `save` does, then the digests; the trainer's state completes the checkpoint after that."""
    save(folder, **values)
    if trainer.args.should_save and folder is not None:
        files = {file for pattern in PATTERNS for file in Path(folder).glob(pattern)}
        write_account(Path(folder, DIGESTS), SavedDigests({file.name: sha256_of(file) for file in sorted(files)}))


def _save_states_with_digests(trainer: Any, save: Any, folder: str) -> None:
    """Save the random numbers, the last of a rank's states, as `save` does, then the digests of all ranks' states."""
    save(folder)
    gather(None)  # all ranks have saved theirs
    if trainer.args.should_save:
        place = Path(folder)
        saved = read_account(place / DIGESTS, SavedDigests)
        states = sorted(file for pattern in ("*.pt", "*.pth") for file in place.rglob(pattern))
        records = {str(file.relative_to(place)): records_digest(file) for file in states}
        write_account(place / DIGESTS, msgspec.structs.replace(saved, records=records))


def _save_with_logits(trainer: Any, save: Any, folder: str | None = None, **values: Any) -> None:
    """Save the model as `save` does, then our files. All ranks call it: each computes, the first one writes."""
    save(folder, **values)
    stored = _rows_with_logits(trainer)
    if trainer.args.should_save and folder is not None:
        save_file(stored, Path(folder, LOGITS))
        write_account(Path(folder, TRAINED), TrainedTensors(_trained_tensors(trainer.model)))


def _trained_tensors(model: Any) -> list[str]:
    """Return the names of the trained tensors under which transformers saves them."""
    names: set[str] = set()
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            whole = torch.empty(getattr(weight, "ds_shape", weight.shape), device="meta")  # DeepSpeed may hold a part
            names.update(revert_weight_conversion(model, {name.replace(_CHECKPOINT_PREFIX, ""): whole}))
    return sorted(names)


def _rows_with_logits(trainer: Any) -> dict[str, torch.Tensor]:
    """Compute the logits of the first rows of the val split, with the present weights.

    The training goes on as if this had not happened: dropout is off meanwhile, and no random number is drawn.
    """
    dataset, model, template = trainer.eval_dataset, trainer.model_wrapped, trainer.template
    stored: dict[str, torch.Tensor] = {}
    was_training = model.training
    model.eval()
    with torch.no_grad(), torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else []):
        for number in range(min(ROWS, len(dataset))):
            batch = trainer.data_collator([dataset[number]])
            batch = {name: value for name, value in batch.items() if name not in NOT_INPUTS}
            inputs = trainer._prepare_input(dict(batch))
            with trainer.compute_loss_context_manager(), template.forward_context(trainer.model, inputs):
                logits = model(**inputs, logits_to_keep=POSITIONS).logits
            stored |= row_tensors(number, batch)
            stored[f"row.{number}.logits"] = logits[0].float().cpu().contiguous()
    model.train(was_training)
    return stored
