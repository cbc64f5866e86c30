"""Micro-batches of padded rows, for models whose rows cannot stand in one sequence."""

from functools import partial
from typing import Any

import torch
from torch.nn.functional import pad

from vlmflow.in_trainer.evaluation import IGNORED


def keep_trained_columns(trainer: Any) -> None:
    """Let ms-swift's trainer keep logits where a row of the batch is trained, from now on.

    With several rows it keeps all columns from the first trained one on (4.6, trainers/mixin.py): four times as many
    for rows of FIRE.
    """
    trainer.prepare_logits_to_keep = partial(_prepare, trainer.prepare_logits_to_keep)


def _prepare(plain: Any, inputs: dict[str, Any]) -> None:
    """Do for several rows what ms-swift does for one. inputs: labels and loss_scale are rows × tokens."""
    labels: torch.Tensor = inputs["labels"]
    if labels.shape[0] == 1:
        plain(inputs)
        return
    trained = (labels != IGNORED).any(dim=0)
    inputs["labels"] = pad(labels[:, trained], (1, 0), value=IGNORED)
    if inputs.get("loss_scale") is not None:
        inputs["loss_scale"] = pad(inputs["loss_scale"][:, trained], (1, 0), value=0)
    inputs["logits_to_keep"] = pad(trained[1:], (0, 1), value=True)
