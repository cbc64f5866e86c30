"""Stores with each checkpoint the SHA-256 of the files that it may release, so that later damage is noticed.

safetensors files have no checksum: blocks of zeros after a crash of the machine, or a flipped bit, read as weights.
"""

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from vlmflow.config.tuners import ADAPTER_CONFIG, MODEL_INDEX
from vlmflow.core.account import write_account
from vlmflow.core.files import sha256_of
from vlmflow.in_trainer.trained_tensors import TRAINED

DIGESTS = "digests.json"
"""The file of a checkpoint with the digests, a `SavedDigests`."""

PATTERNS = ("*.safetensors", ADAPTER_CONFIG, MODEL_INDEX, TRAINED)
"""The files of a checkpoint that have a digest: no training changes them after it saved them."""


class SavedDigests(msgspec.Struct, frozen=True):
    """The SHA-256 of a checkpoint's files when they were saved, by name."""

    sha256: dict[str, str]


def store_digests_with_each_checkpoint(trainer: Any) -> None:
    """Make a trainer of transformers write the digests whenever it has saved the model."""
    trainer.save_model = partial(_save_model, trainer, trainer.save_model)


def changed_since_saved(checkpoint: Path, names: Iterable[str]) -> list[str]:
    """Return those files of a checkpoint whose bytes are not the saved ones.

    A checkpoint without digests, of an earlier version, gives []. Raises ValueError if the digests cannot be read.
    """
    if not (checkpoint / DIGESTS).exists():
        return []
    saved = msgspec.json.decode((checkpoint / DIGESTS).read_bytes(), type=SavedDigests).sha256
    return [name for name in names if saved.get(name) != sha256_of(checkpoint / name)]


def _save_model(trainer: Any, save: Any, folder: str | None = None, **values: Any) -> None:
    """Save the model as `save` does, then the digests; the trainer's state completes the checkpoint after that."""
    save(folder, **values)
    if trainer.args.should_save and folder is not None:
        files = {file for pattern in PATTERNS for file in Path(folder).glob(pattern)}
        write_account(Path(folder, DIGESTS), SavedDigests({file.name: sha256_of(file) for file in sorted(files)}))
