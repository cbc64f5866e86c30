"""Verifies that a folder answers as the model did in the trainer, after a training of the model's own weights.

The trainer stored some rows as it fed them to the model, with the logits (`trainer/stored_logits`). Here plain
transformers loads the folder and answers the same rows. `logit_proof` has the rules.
"""

from collections import ChainMap
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from vlmflow.config.tuners import FULL
from vlmflow.core.progress import lines_meanwhile
from vlmflow.in_trainer.messages import LOGITS, POSITIONS
from vlmflow.merging.loaded_model import (
    allowed_deviation,
    free,
    has_experts,
    load,
    logits_of,
    rounds_finer,
    stored_type,
    too_large,
)
from vlmflow.merging.logit_proof import compare, judge
from vlmflow.merging.proof import LogitProof
from vlmflow.supervisor.released import released_files
from vlmflow.swift.row_tensors import Inputs, rows_in


@lines_meanwhile("the comparison of logits")
def verify_stored_logits(base: Path, released: Path, merged: Path, device: str, dtype: str) -> LogitProof:
    """Compare the logits that the trainer stored with those of the folder `merged`.

    base: the base model's folder, whose answers show what the training changed. released: the folder with the files
    that the training released. device: cpu, or cuda; several GPUs share one model. dtype: the type in which the models
    compute; the trainer's was the same.

    One model is in memory at a time.

    Raises VlmflowError if a folder does not load offline, a model does not fit into memory, or the logits of the merged
    model violate a rule.
    """
    disable_progress_bar()
    inputs, expected = _stored(load_file(released / LOGITS))
    stored, computed = stored_type(merged), getattr(torch, dtype)
    try:
        model = load(base, device, dtype)
        plain = _logits(model, inputs)
        if not _take_weights(model, released, stored):
            del model
            free(device)
            model = load(base, device, dtype, state_dict=dict(ChainMap(*_weights(released, stored))))
        rounded = _logits(model, inputs)
        del model
        free(device)
        model = load(merged, device, dtype)
        found = _logits(model, inputs)
    except torch.OutOfMemoryError:
        raise too_large(base, device) from None
    allowed = allowed_deviation(model, stored, computed)
    proof = compare(plain, expected, rounded, found, allowed, len(inputs), dtype, device, has_experts(model))
    return msgspec.structs.replace(proof, verdict=judge(proof, merged, exact=not rounds_finer(stored, computed)))


def _stored(tensors: Mapping[str, torch.Tensor]) -> tuple[list[Inputs], torch.Tensor]:
    """Return the rows' inputs, and their logits one after the other."""
    rows = rows_in(tensors)
    return rows, torch.cat([row.pop("logits") for row in rows])


def _logits(model: PreTrainedModel, inputs: list[Inputs]) -> torch.Tensor:
    return torch.cat([logits_of(model, row, POSITIONS) for row in inputs])


def _take_weights(model: torch.nn.Module, released: Path, stored: torch.dtype) -> bool:
    """Give a model the checkpoint's weights, rounded to the type `stored`, file by file.

    Returns False if transformers has other names for them in memory: it must load them itself.
    """
    own = model.state_dict().keys()
    for weights in _weights(released, stored):
        if not weights.keys() <= own:
            return False
        model.load_state_dict(weights, strict=False)
    return True


def _weights(released: Path, stored: torch.dtype) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the tensors of each of the checkpoint's files by name, rounded."""
    for name in released_files(released, FULL):
        if name.endswith(".safetensors") and name != LOGITS:
            yield {key: tensor.to(stored) for key, tensor in load_file(released / name).items()}
