"""Rows as a model's inputs, in a file of tensors: `row.N.NAME` is an input of row N as the model's `forward` takes it.

They are what ms-swift's template and collator make of a row. Beside them may stand `row.N.logits`.
"""

from collections.abc import Mapping
from typing import Any

import torch

from vlmflow.swift import row_attention

NOT_INPUTS = ("labels", "loss_scale", "channel", "text_position_ids")
"""What a batch of ms-swift has besides the model's inputs."""

NOT_STORED = ("position_ids", row_attention.ROWS, *row_attention.FOR_FLASH)
"""The inputs that a model computes from the others for a single row: positions, and where the row begins and ends."""

Inputs = dict[str, torch.Tensor]
"""The inputs of a model for one row, by name."""


def row_tensors(number: int, batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the inputs of a batch of one row by their names in a file. number: of the row there."""
    return {
        f"row.{number}.{name}": value.contiguous().cpu()
        for name, value in batch.items()
        if isinstance(value, torch.Tensor) and name not in NOT_INPUTS + NOT_STORED
    }


def rows_in(tensors: Mapping[str, torch.Tensor]) -> list[Inputs]:
    """Return the tensors of each row by their own names, in the order of the rows."""
    rows: dict[int, Inputs] = {}
    for key, tensor in tensors.items():
        _, number, name = key.split(".")
        rows.setdefault(int(number), {})[name] = tensor
    return [rows[number] for number in sorted(rows)]
