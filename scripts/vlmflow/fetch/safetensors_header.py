"""The header of a safetensors file: where each tensor's bytes are. It needs no torch.

A file has 8 bytes with the header's length (little endian), the header in JSON, and the tensors' bytes one after the
other without gaps (https://github.com/huggingface/safetensors#format). The safetensors package returns tensors but not
their offsets, which whoever reads or writes in place needs.
"""

import json
import math
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmflow.core.errors import VlmflowError

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""The safetensors package's own limit, against headers that fill the memory."""

MAX_NUMBER = 1 << 63
MAX_DIMENSIONS = 32
"""Limits of a tensor's size and dimensions; the product of many larger numbers would take hours."""

MOST_CHARS = 1_000
"""Of a tensor's name."""

ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1}
"""The bytes of a number of the types that are read, by the format's names."""

WHOLE_AGAIN = "fetch or write the file again; a full disk or a killed process can leave such files"


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file.

    dtype: the format's name of the type ("BF16").
    begin, end: its bytes, counted from the start of the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def rows(self) -> int:
        """The length of the first dimension; 1 for a single number."""
        return self.shape[0] if self.shape else 1

    @property
    def columns(self) -> int:
        """The elements of one row."""
        return math.prod(self.shape[1:])

    @property
    def matrices_transposed(self) -> tuple[int, ...]:
        """The shape with rows and columns of each matrix swapped, of a tensor of matrices; otherwise the shape."""
        return (self.shape[0], self.shape[2], self.shape[1]) if len(self.shape) == 3 else self.shape


@dataclass(frozen=True)
class SafetensorsFile:
    """A file with a checked header; `tensors` are in the order of their bytes."""

    path: Path
    size: int
    data_begin: int
    tensors: dict[str, TensorEntry]


def read_header(path: Path) -> SafetensorsFile:
    """Read and check the header: every tensor's bytes exist, without gap, overlap or rest.

    Raises VlmflowError with the file, and the tensor, if not.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        data_begin = LENGTH_BYTES + length
        if size < LENGTH_BYTES or length > MAX_HEADER_BYTES or data_begin > size:
            raise _broken(path, f"its header would end at byte {data_begin:,}, the file has {size:,}")
        raw = file.read(length)
    try:
        header = json.loads(raw, object_pairs_hook=_unique)
        entries = [_entry(name, value, data_begin) for name, value in header.items() if name != "__metadata__"]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _broken(path, f"its header cannot be read: {error}") from None
    entries.sort(key=lambda entry: (entry.begin, entry.end))
    position = data_begin
    for entry in entries:
        if entry.begin != position:
            raise _broken(path, f"tensor {entry.name} begins at byte {entry.begin:,}, not at {position:,}")
        position = entry.end
    if position > size:
        raise _broken(path, f"truncated: the header promises {position:,} bytes, the file has {size:,}")
    if position < size:
        raise _broken(path, f"{size - position:,} bytes follow the last tensor")
    return SafetensorsFile(path, size, data_begin, {entry.name: entry for entry in entries})


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = dict(pairs)
    if len(names) != len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = next(name for name, count in counts.items() if count > 1)
        raise ValueError(f"{twice} appears twice")
    return names


def _entry(name: str, value: dict[str, Any], data_begin: int) -> TensorEntry:
    dtype, shape, (begin, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
    if not name.isprintable() or len(name) > MOST_CHARS:  # messages show it
        raise ValueError(f"tensor {name!r:.200} has control characters in its name, or more than {MOST_CHARS:,}")
    sound = all(type(number) is int and 0 <= number < MAX_NUMBER for number in [*shape, begin, end])
    if not isinstance(dtype, str) or not sound or len(shape) > MAX_DIMENSIONS or end < begin:
        raise ValueError(f"tensor {name} has a wrong type, shape or place")
    if dtype in ITEM_BYTES and end - begin != math.prod(shape) * ITEM_BYTES[dtype]:
        raise ValueError(f"tensor {name} has {end - begin:,} bytes, which does not match {dtype} of shape {shape}")
    return TensorEntry(name, dtype, shape, data_begin + begin, data_begin + end)


def _broken(path: Path, what: str) -> VlmflowError:
    return VlmflowError(f"{path}: {what}", WHOLE_AGAIN)
