"""Reads and writes the tensors of a safetensors file, as their own bytes."""

import os

import torch

from vlmflow.core.errors import VlmflowError
from vlmflow.fetch.safetensors_header import WHOLE_AGAIN, SafetensorsFile, TensorEntry

FLOAT_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""The types of weights that are trained and merged, by the format's names."""


def read_tensor(file: SafetensorsFile, name: str) -> torch.Tensor:
    """Read one tensor of the types in FLOAT_TYPES, in its own type and shape."""
    entry = file.tensors[name]
    tensor = torch.empty(entry.shape, dtype=FLOAT_TYPES[entry.dtype])
    with file.path.open("rb") as source:
        read_rows(source.fileno(), entry, 0, tensor)
    return tensor


def read_rows(descriptor: int, entry: TensorEntry, first: int, rows: torch.Tensor) -> None:
    """Fill `rows`, contiguous and of the tensor's own type, with the tensor's rows from number `first` on.

    Raises VlmflowError if the file ends too early.
    """
    offset = entry.begin + first * entry.columns * rows.itemsize
    view = _bytes_of(rows)
    while view:
        count = os.preadv(descriptor, [view], offset)
        if count == 0:
            raise VlmflowError(f"tensor {entry.name}: its file became shorter during reading", WHOLE_AGAIN)
        view, offset = view[count:], offset + count


def write_rows(descriptor: int, entry: TensorEntry, first: int, rows: torch.Tensor) -> None:
    """Overwrite the tensor's rows from number `first` on with `rows`, contiguous and of the tensor's own type."""
    offset = entry.begin + first * entry.columns * rows.itemsize
    view = _bytes_of(rows)
    while view:
        count = os.pwrite(descriptor, view, offset)
        view, offset = view[count:], offset + count


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())
