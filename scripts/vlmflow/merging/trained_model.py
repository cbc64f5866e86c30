"""A checkpoint of the model's own weights, as the tuner full leaves it, and how it changes the base's tensors.

transformers writes its files (modeling_utils.py, `save_pretrained`): the names of tensors are those of the base's
files, the types are those of the training, and the division into shards is its own. Matrices of experts that it
transposes as it loads them, because their shape says so, it saves as in memory (`core_model_loading.Transpose`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from vlmflow.config.tuners import FULL
from vlmflow.core.account import read_account
from vlmflow.core.errors import VlmflowError
from vlmflow.fetch.safetensors_header import TensorEntry, read_header
from vlmflow.in_trainer.messages import LOGITS, TRAINED, TrainedTensors
from vlmflow.merging.adapter import INPUT_EMBEDDINGS, OUTPUT_HEADS, Update
from vlmflow.merging.safetensors_file import FLOAT_TYPES
from vlmflow.supervisor.released import released_files

TRAIN_AGAIN = "remove the folder and run the same command again: it is copied from its run folder"

TRAIN_OTHERWISE = (
    "train an adapter instead (runs.NAME.tuner: lora): the merge takes over only weights that the base has under the "
    "same names"
)


@dataclass(frozen=True)
class TrainedModel:
    """tensors: the file of each tensor, and its place there, by name. trained: the names of those that were trained."""

    folder: Path
    tensors: dict[str, tuple[Path, TensorEntry]]
    trained: list[str]

    def place(self, key: str) -> tuple[Path, TensorEntry]:
        """Return the file of a tensor, and its place there."""
        return self.tensors[key]


def read_trained_model(folder: Path) -> TrainedModel:
    """Read the headers of the weights in `checkpoints/RUN/{smoke,full}` or in a checkpoint.

    Raises VlmflowError if a file is missing or damaged.
    """
    try:
        released = released_files(folder, FULL)
    except (OSError, ValueError, SafetensorError) as error:
        raise VlmflowError(f"{folder}: its weights cannot be read: {error}", TRAIN_AGAIN) from None
    trained = read_account(folder / TRAINED, TrainedTensors).tensors
    headers = [read_header(folder / name) for name in released if name.endswith(".safetensors") and name != LOGITS]
    tensors = {name: (header.path, entry) for header in headers for name, entry in header.tensors.items()}
    return TrainedModel(folder, tensors, trained)


def plan_replacements(
    model: TrainedModel, base: Mapping[str, TensorEntry], config: Mapping[str, Any]
) -> dict[str, Update]:
    """Return the update of every trained tensor of the base, by its name: the checkpoint's tensor replaces it.

    base: the base's tensors by name. config: the base's config.json.

    Raises VlmflowError with the name of a trained tensor that has no place in the base or another shape, of a tensor
    that only one of the two has, or of an embedding that the base stores twice.
    """
    for name in model.trained:
        if name not in base:
            raise _fault(model, name, "was trained, but the base has no tensor of this name")
        if name not in model.tensors:
            raise _fault(model, name, "was trained, but the checkpoint does not have it")
        (_, found), expected = model.tensors[name], base[name]
        if found.shape != expected.shape and not _swaps(found, expected):
            raise _fault(model, name, f"has shape {found.shape}, in the base {expected.shape}")
        for which, entry in (("checkpoint", found), ("base", expected)):
            if entry.dtype not in FLOAT_TYPES:
                supported = ", ".join(FLOAT_TYPES)
                raise _fault(model, name, f"is {entry.dtype} in the {which}; the merge supports {supported}")
    if not model.trained:
        raise VlmflowError(f"{model.folder / TRAINED}: names no trained tensor", TRAIN_OTHERWISE)
    for name in model.tensors:
        if name not in base:
            raise _fault(model, name, "is in the checkpoint, but not in the base")
    tied = _stored_twice(base, config)
    for name in base:
        if name not in model.tensors and not (tied and _last(name) in INPUT_EMBEDDINGS + OUTPUT_HEADS):
            raise _fault(model, name, "is in the base, but not in the checkpoint")
    if tied and any(_last(name) in INPUT_EMBEDDINGS + OUTPUT_HEADS for name in model.trained):
        raise VlmflowError(
            f"{model.folder}: the token embeddings were trained, which the base stores twice ({', '.join(tied)}), "
            "although it ties them (tie_word_embeddings)",
            "remove the second copy from the base's files, or untie it (config.json), and train again",
        )
    return {name: Update(replacement=name, swaps=_swaps(model.place(name)[1], base[name])) for name in model.trained}


def as_in_base(rows: torch.Tensor, entry: TensorEntry, swaps: bool) -> torch.Tensor:
    """Return rows of a checkpoint's tensor, which stands at `entry`, in the base's layout. swaps: see `Update`."""
    return rows.view(-1, *entry.shape[1:]).mT.flatten(1) if swaps else rows


def _swaps(found: TensorEntry, expected: TensorEntry) -> bool:
    """Return whether each matrix of a tensor has as many rows in the checkpoint as columns in the base."""
    return found.shape != expected.shape and found.matrices_transposed == expected.shape


def _stored_twice(base: Mapping[str, TensorEntry], config: Mapping[str, Any]) -> list[str]:
    """Return the names of both copies if the base ties its embeddings to the output head, but stores both."""
    if not any(part.get("tie_word_embeddings") for part in (config, config.get("text_config") or {})):
        return []
    names = {kind: [name for name in base if _last(name) in kind] for kind in (INPUT_EMBEDDINGS, OUTPUT_HEADS)}
    return [*names[INPUT_EMBEDDINGS], *names[OUTPUT_HEADS]] if all(names.values()) else []


def _last(name: str) -> str:
    """Return the name of a tensor's layer in its block: q_proj."""
    return name.rpartition(".")[0].rpartition(".")[2]


def _fault(model: TrainedModel, name: str, what: str) -> VlmflowError:
    return VlmflowError(f"{model.folder}: tensor {name} {what}", TRAIN_OTHERWISE)
