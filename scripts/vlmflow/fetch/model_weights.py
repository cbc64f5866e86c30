"""A model's weights: the files that hold them, and where each tensor's bytes are. It needs no torch.

A safetensors file has 8 bytes with the header's length (little endian), the header in JSON, and the tensors' bytes one
after the other without gaps (https://github.com/huggingface/safetensors#format). The safetensors package returns
tensors but not their offsets, which whoever reads or writes in place needs.
"""

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import read_json
from vlmflow.fetch.model_files import CONFIG, FETCH_AGAIN, INDEX, SINGLE, read_weight_map, refuse_quantised, shown

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
        header, data_begin = _header(_reader(file), size, str(path))
    try:
        entries = [_entry(name, value, data_begin) for name, value in header.items()]
    except (ValueError, TypeError, KeyError) as error:
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


Read = Callable[[int, int], bytes]
"""Returns a file's bytes from one place up to another one, exclusive."""


def _reader(file: BinaryIO) -> Read:
    def read(start: int, end: int) -> bytes:
        file.seek(start)
        return file.read(end - start)

    return read


def _header(read: Read, size: int, file: str) -> tuple[dict[str, Any], int]:
    """Return what a header says of each tensor, by name, and where it ends. size: the file's bytes. file: its name.

    Raises VlmflowError if it is none.
    """
    length = int.from_bytes(read(0, LENGTH_BYTES), "little") if size >= LENGTH_BYTES else size
    end = LENGTH_BYTES + length
    if length > MAX_HEADER_BYTES or end > size:
        raise _broken(file, f"its header cannot be read: it would end at byte {end:,}, the file has {size:,}")
    try:
        header = json.loads(read(LENGTH_BYTES, end), object_pairs_hook=_unique)
        header.pop("__metadata__", None)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise _broken(file, f"its header cannot be read: {error}") from None
    return header, end


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


def _broken(file: Path | str, fault: str) -> VlmflowError:
    return VlmflowError(f"{file}: {fault}", WHOLE_AGAIN)


WEIGHT_SUFFIXES = (
    *(".bin", ".ckpt", ".gguf", ".h5", ".index.json", ".msgpack", ".onnx", ".onnx_data", ".pt", ".pth"),
    *(".safetensors", ".tflite"),
)
"""Suffixes of weights. Files beside the shards still hold the unmerged model, so they are left out."""


@dataclass(frozen=True)
class ModelWeights:
    """A model's folder, sorted into weights and other files.

    folder: the folder of the files.
    config: the content of config.json.
    shards: the safetensors files by name, in the order of their names.
    others: the names of all files that are copied unchanged.
    left_out: the names of weights in other formats, or in files that the index does not name.
    """

    folder: Path
    config: dict[str, Any]
    shards: dict[str, SafetensorsFile]
    others: list[str]
    left_out: list[str]

    def tensors(self) -> dict[str, TensorEntry]:
        """Return every tensor of the model by its name."""
        return {name: entry for shard in self.shards.values() for name, entry in shard.tensors.items()}


def read_model_weights(folder: Path, files: Collection[str], *, dequantize: bool = False) -> ModelWeights:
    """Read the headers of a model's weights and check that they agree with each other and with the index.

    folder: the model's folder.
    files: the names of the model's files, relative to it; other files there are ignored.
    dequantize: whether the model must be quantised, in FP8.

    Raises VlmflowError for weights that are missing, duplicate, truncated, quantised, or not in safetensors.
    """
    if CONFIG not in files:
        raise VlmflowError(f"{folder / CONFIG}: is missing", FETCH_AGAIN)
    config = refuse_quantised(folder / CONFIG, dequantize=dequantize)
    weight_map = _weight_map(folder, files)
    shards = {name: read_header(folder / name) for name in sorted(set(weight_map.values()) or {SINGLE})}
    stored: dict[str, str] = {}
    for name, shard in shards.items():
        for tensor in shard.tensors:
            if (other := stored.setdefault(tensor, name)) != name:
                cause = f"{shard.path}: tensor {tensor} is also in {other}, so it is unclear which one counts"
                raise VlmflowError(cause, FETCH_AGAIN)
    if weight_map:
        _refuse_other_index(folder / INDEX, weight_map, stored)
    rest = set(files) - set(shards)
    left_out = {name for name in rest if name != INDEX and name.endswith(WEIGHT_SUFFIXES)}
    return ModelWeights(folder, config, shards, sorted(rest - left_out), sorted(left_out))


def _weight_map(folder: Path, files: Collection[str]) -> dict[str, str]:
    """Return the index's map from tensor to file; {} if one file has everything."""
    if SINGLE in files and INDEX in files:
        raise VlmflowError(
            f"{folder}: has both {SINGLE} and {INDEX}, so it is unclear which holds the weights",
            "use a revision of the model that has only one of them",
        )
    if SINGLE in files:
        return {}
    if INDEX not in files:
        others = sorted(name for name in files if name.endswith(WEIGHT_SUFFIXES))
        raise VlmflowError(
            f"{folder}: has no weights in safetensors form, but {', '.join(others) or 'no weights at all'}",
            "use a revision of the model that has safetensors, or convert it with save_pretrained",
        )
    return read_weight_map(folder / INDEX, files)


def _refuse_other_index(index: Path, weight_map: Mapping[str, str], stored: Mapping[str, str]) -> None:
    """Refuse an index that differs from what the files hold. stored: the file of each tensor."""
    for tensor, shard in sorted(stored.items() ^ weight_map.items()):
        which = "is listed for" if weight_map.get(tensor) == shard else "is not listed, but is in"
        raise VlmflowError(f"{index}: tensor {shown(tensor)} {which} {shard}: index and shards disagree", FETCH_AGAIN)


def tensor_names(folder: Path, names: Collection[str]) -> list[str] | None:
    """Return the names of a model's tensors, sorted; None if neither an index nor the weights in one file are there.

    folder: a folder of the model's files. names: those that it has, and may have without weights.

    Raises VlmflowError for weights without a readable header.
    """
    if INDEX in names:
        return sorted(read_json(folder / INDEX)["weight_map"])
    return _names_in(folder / SINGLE) if SINGLE in names and (folder / SINGLE).is_file() else None


def _names_in(file: Path) -> list[str]:
    with file.open("rb") as content:
        return read_names(_reader(content), file.stat().st_size, str(file))


def read_names(read: Read, size: int, file: str) -> list[str]:
    """Return the names of the tensors in a safetensors file, sorted. size: its bytes. file: its name for people.

    Raises VlmflowError if the header is not one.
    """
    return sorted(_header(read, size, file)[0])


def refuse_other_tensors(folder: Path, names: Collection[str]) -> None:
    """Raise VlmflowError if the index of a model names other tensors than its files have. It reads only their headers.

    folder, names: the model's files.
    """
    if INDEX in names:
        weight_map: dict[str, str] = read_json(folder / INDEX)["weight_map"]
        stored = {tensor: shard for shard in sorted(set(weight_map.values())) for tensor in _names_in(folder / shard)}
        _refuse_other_index(folder / INDEX, weight_map, stored)
