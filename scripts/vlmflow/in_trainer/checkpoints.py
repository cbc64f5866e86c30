"""What a trainer stores with each checkpoint besides ms-swift's files.

- The SHA-256 of the files that it may release, so that later damage is noticed. safetensors files have no checksum:
  blocks of zeros after a crash of the machine, or a flipped bit, read as weights.
- Of the model's own weights, which tensors were trained, and some rows with their logits. They let the proof show that
  the published folder answers as the model did in the trainer, without trusting what saved or rewrote the weights.

The supervisor and the proofs read these files, some without torch; so functions of the trainer import it.
"""

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from vlmflow.config.tuners import ADAPTER_CONFIG, MODEL_INDEX
from vlmflow.core.account import write_account
from vlmflow.core.files import sha256_of

if TYPE_CHECKING:
    import torch

TRAINED = "trained.json"
"""The file with the names of the trained tensors, a `TrainedTensors`."""

LOGITS = "logits.safetensors"
"""The file with some rows of the val split as the trainer fed them to the model, and the model's logits there.

Tensors by name: `row.N.NAME`, an input of row N as the model's `forward` takes it; `row.N.logits`, positions by
vocabulary in float32.
"""

ROWS = 8
"""The most rows that are stored."""

POSITIONS = 16
"""The last positions of a row whose logits are stored; they depend on everything before them."""


class TrainedTensors(msgspec.Struct, frozen=True):
    """The names of the trained tensors, as in the checkpoint's safetensors files."""

    tensors: list[str]


DIGESTS = "digests.json"
"""The file of a checkpoint with the digests, a `SavedDigests`."""

PATTERNS = ("*.safetensors", ADAPTER_CONFIG, MODEL_INDEX, TRAINED)
"""The files of a checkpoint that have a digest: no training changes them after it saved them."""


class SavedDigests(msgspec.Struct, frozen=True):
    """The SHA-256 of a checkpoint's files when they were saved, by name."""

    sha256: dict[str, str]


def store_digests_with_each_checkpoint(trainer: Any) -> None:
    """Make a trainer of transformers write the digests whenever it has saved the model."""
    trainer.save_model = partial(_save_with_digests, trainer, trainer.save_model)


def changed_since_saved(checkpoint: Path, names: Iterable[str]) -> list[str]:
    """Return those files of a checkpoint whose bytes are not the saved ones.

    A checkpoint without digests, of an earlier version, gives []. Raises ValueError if the digests cannot be read.
    """
    if not (checkpoint / DIGESTS).exists():
        return []
    saved = msgspec.json.decode((checkpoint / DIGESTS).read_bytes(), type=SavedDigests).sha256
    return [name for name in names if saved.get(name) != sha256_of(checkpoint / name)]


def _save_with_digests(trainer: Any, save: Any, folder: str | None = None, **values: Any) -> None:
    """Save the model as `save` does, then the digests; the trainer's state completes the checkpoint after that."""
    save(folder, **values)
    if trainer.args.should_save and folder is not None:
        files = {file for pattern in PATTERNS for file in Path(folder).glob(pattern)}
        write_account(Path(folder, DIGESTS), SavedDigests({file.name: sha256_of(file) for file in sorted(files)}))


def store_logits_with_each_checkpoint(trainer: Any) -> None:
    """Make a trainer of transformers write both files whenever it saves the model."""
    trainer.save_model = partial(_save_with_logits, trainer, trainer.save_model)


def _save_with_logits(trainer: Any, save: Any, folder: str | None = None, **values: Any) -> None:
    """Save the model as `save` does, then our files. All ranks call it: each computes, the first one writes."""
    from safetensors.torch import save_file

    save(folder, **values)
    stored = _rows_with_logits(trainer)
    if trainer.args.should_save and folder is not None:
        save_file(stored, Path(folder, LOGITS))
        write_account(Path(folder, TRAINED), TrainedTensors(_trained_tensors(trainer.model)))


def _trained_tensors(model: Any) -> list[str]:
    """Return the names of the trained tensors under which transformers saves them."""
    import torch
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_PREFIX
    from transformers.core_model_loading import revert_weight_conversion

    found: set[str] = set()
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            whole = torch.empty(getattr(weight, "ds_shape", weight.shape), device="meta")  # DeepSpeed may hold a part
            found.update(revert_weight_conversion(model, {name.replace(_CHECKPOINT_PREFIX, ""): whole}))
    return sorted(found)


def _rows_with_logits(trainer: Any) -> "dict[str, torch.Tensor]":
    """Compute the logits of the first rows of the val split, with the present weights.

    The training goes on as if this had not happened: dropout is off meanwhile, and no random number is drawn.
    """
    import torch

    from vlmflow.swift.row_tensors import NOT_INPUTS, row_tensors

    dataset, model, template = trainer.eval_dataset, trainer.model_wrapped, trainer.template
    stored: dict[str, torch.Tensor] = {}
    was_training = model.training
    model.eval()
    with torch.no_grad(), torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else []):
        for number in range(min(ROWS, len(dataset))):
            batch = trainer.data_collator([dataset[number]])
            batch = {name: value for name, value in batch.items() if name not in NOT_INPUTS}
            inputs = trainer._prepare_input(dict(batch))
            inputs.pop("text_position_ids", None)
            with trainer.compute_loss_context_manager(), template.forward_context(trainer.model, inputs):
                logits = model(**inputs, logits_to_keep=POSITIONS).logits
            stored |= row_tensors(number, batch)
            stored[f"row.{number}.logits"] = logits[0].float().cpu().contiguous()
    model.train(was_training)
    return stored
