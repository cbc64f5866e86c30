"""Makes a bfloat16 base of a model in FP8: each number times the scale of its block, in float32, rounded once.

transformers does the same where it cannot compute in FP8 (5.19, Fp8Dequantize in integrations/finegrained_fp8.py), so
the base has the same bits. It needs no torch, which the image that fetches models does not have.
"""

import json
import math
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from vlmflow.core.account import read_account, write_account
from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import BUFFER, json_bytes, locked, read_json, require_free_disk, whole_folder
from vlmflow.core.progress import Progress, in_threads
from vlmflow.fetch.model_files import CONFIG, INDEX, block_of, without_quantisation
from vlmflow.fetch.model_weights import ITEM_BYTES, LENGTH_BYTES, ModelWeights, TensorEntry, read_model_weights
from vlmflow.fetch.placed import FileRecord, digest_of, hash_files

DEQUANTISED = "bfloat16"
"""The folder of a store with the bases that were in FP8, by the digest of what they were made of."""

RECORD = ".files.json"
"""Beside the files of such a base: size and SHA-256 of each."""

FP8, BFLOAT16 = "F8_E4M3", "BF16"
"""The types before and after, by the names of the safetensors format."""

SCALE, ACTIVATION = "_scale_inv", ".activation_scale"
"""What the name of a weight's scale has after the weight's, and that of a layer's inputs, which only FP8 needs."""

PIECE = 1 << 19
"""Numbers that are computed at a time: they and what is made of them fit into a core's cache."""

LARGEST = 0x7F7F
"""The bits of the largest number in bfloat16; those above are infinity and NaN."""

OTHER_MODEL = "use the files that the model's owner published, or the unquantised model"


def _values() -> NDArray[np.float32]:
    """Return the number that each of the 256 codes of E4M3 means (arXiv:2209.05433, table 1)."""
    codes = np.arange(256)
    exponent, fraction = codes >> 3 & 15, codes & 7
    size = np.where(exponent, np.ldexp(8 + fraction, exponent - 10), np.ldexp(fraction, -9))
    size[codes & 127 == 127] = np.nan
    signed: NDArray[np.float32] = np.where(codes < 128, size, -size).astype(np.float32)
    return signed


E4M3 = _values()


def to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Return the bits of numbers in bfloat16, rounded to nearest, ties to even. NaN must be numpy's own."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def without_scales(names: Iterable[str]) -> list[str]:
    """Return the names of a model's tensors that are no scales of others."""
    return [name for name in names if not name.endswith((SCALE, ACTIVATION))]


def written_small_files(folder: Path, names: Iterable[str], total: int | None = None) -> dict[str, bytes]:
    """Return what the bfloat16 base has in place of config.json and the index, by name.

    folder, names: the files of the model in FP8. total: bytes of the weights, for the index; None if it is not known.
    """
    written = {CONFIG: without_quantisation(folder / CONFIG)}
    if INDEX in names:
        shards = read_json(folder / INDEX)["weight_map"]
        written[INDEX] = {
            "metadata": {} if total is None else {"total_size": total},
            "weight_map": {name: shards[name] for name in without_scales(shards)},
        }
    return {name: json_bytes(value) for name, value in written.items()}


def dequantised(
    store: Path, folder: Path, files: Mapping[str, FileRecord], threads: int
) -> tuple[Path, dict[str, FileRecord]]:
    """Make the bfloat16 base of a model in FP8 in a store, unless it is there; returns its folder and files by name.

    folder, files: those of the model in FP8. threads: tensors that are made at a time.

    Raises VlmflowError with file and tensor if weights and scales do not fit together, PassingError without disk.
    """
    made = store / DEQUANTISED / digest_of(files)[:16]
    # Several models of a configuration may be made of one in FP8.
    with locked(made.with_suffix(".lock"), f"{made}: another process makes this base; waiting for it"):
        if (made / RECORD).is_file():
            recorded = read_account(made / RECORD, dict[str, FileRecord])
            there = hash_files(made, [name for name in recorded if (made / name).is_file()], threads)
            if there == recorded:
                return made, there
        weights = read_model_weights(folder, files.keys(), dequantize=True)
        tensors = _tensors(weights, block_of(folder / CONFIG))
        with whole_folder(made) as part:
            names = _write(weights, tensors, part, folder.name, threads)
            records = hash_files(part, names, threads)
            write_account(part / RECORD, records)
    return made, records


@dataclass(frozen=True)
class _Stored:
    """A tensor of the model in FP8, with its file."""

    file: Path
    entry: TensorEntry

    def wrong(self, fault: str) -> VlmflowError:
        return VlmflowError(f"{self.file}: tensor {self.entry.name} {fault}", OTHER_MODEL)

    def read(self, file: BinaryIO, size: int) -> bytes:
        """Return the next bytes. file: its file."""
        content = file.read(size)
        if len(content) < size:
            raise self.wrong("ends too early: its file became shorter during reading")
        return content


@dataclass(frozen=True)
class _Tensor:
    """A tensor of the bfloat16 base.

    source: what it is made of. scales: its scales; None if it stays as it is. block: rows and columns with one scale.
    """

    source: _Stored
    scales: _Stored | None = None
    block: tuple[int, int] = (0, 0)

    @property
    def bytes(self) -> int:
        """Its size in the base."""
        size = self.source.entry.end - self.source.entry.begin
        return size * ITEM_BYTES[BFLOAT16] if self.scales else size


def _tensors(weights: ModelWeights, block: tuple[int, int] | None) -> list[_Tensor]:
    """Return the tensors of the base, each weight in FP8 with its scales. block: of the model; None: whole matrices.

    Raises VlmflowError with file and tensor for one without the other, or that do not fit together.
    """
    stored = {
        name: _Stored(file.path, entry) for file in weights.shards.values() for name, entry in file.tensors.items()
    }
    in_fp8 = {name for name, tensor in stored.items() if tensor.entry.dtype == FP8}
    for name in sorted(stored.keys() - set(without_scales(stored))):
        weight = name.removesuffix(SCALE) if name.endswith(SCALE) else f"{name.removesuffix(ACTIVATION)}.weight"
        if weight not in in_fp8:
            raise stored[name].wrong(f"is a scale, but the model has no tensor {weight} in FP8")
    names = without_scales(stored)
    for name in names:
        if name not in in_fp8 and (dtype := stored[name].entry.dtype).startswith(("F8", "F6", "F4")):
            raise stored[name].wrong(f"is {dtype}; only {FP8} can become bfloat16")
    if not in_fp8:
        raise VlmflowError(f"{weights.folder}: has no tensor in FP8, but its {CONFIG} says so", OTHER_MODEL)
    return [_scaled(stored, name, block) if name in in_fp8 else _Tensor(stored[name]) for name in names]


def _scaled(stored: Mapping[str, _Stored], name: str, block: tuple[int, int] | None) -> _Tensor:
    """Return a tensor in FP8 with its scales; raises VlmflowError if they are missing, or of another form or shape."""
    weight, layer = stored[name], name.removesuffix(".weight")
    others = [f"{name}_scale", f"{layer}.scale", f"{layer}.input_scale"]
    if other := next((other for other in others if other in stored), None):
        raise weight.wrong(f"has the scale {other}, which is of another form of FP8")
    if (scales := stored.get(name + SCALE)) is None:
        raise weight.wrong(f"is in FP8, but the model has no scale {name}{SCALE}")
    shape = weight.entry.shape
    if len(shape) < 2 or 0 in shape:
        raise weight.wrong(f"is in FP8, but has shape {shape}, and no blocks")
    *several, rows, columns = shape
    high, wide = (rows, columns) if block is None else (min(block[0], rows), min(block[1], columns))
    expected = (*several, math.ceil(rows / high), math.ceil(columns / wide))
    one_number = block is None and not several and math.prod(scales.entry.shape) == 1
    if scales.entry.shape != expected and not one_number:
        form = f"blocks of {block[0]} × {block[1]}" if block else "a scale for the whole matrix"
        raise scales.wrong(f"has shape {scales.entry.shape}; for {shape} and {form} it must be {expected}")
    if scales.entry.dtype not in ("F32", "BF16", "F16"):
        raise scales.wrong(f"is {scales.entry.dtype}; scales must be F32, BF16 or F16")
    return _Tensor(weight, scales, (high, wide))


def _write(weights: ModelWeights, tensors: list[_Tensor], target: Path, name: str, threads: int) -> list[str]:
    """Write all files of the base into a folder; returns their names. name: the model's, for people."""
    total = sum(tensor.bytes for tensor in tensors)
    require_free_disk(target, total, f"the bfloat16 copy of {weights.folder}")
    written = written_small_files(weights.folder, weights.others, total)
    for other in weights.others:
        (target / other).parent.mkdir(parents=True, exist_ok=True)
        if other in written:
            (target / other).write_bytes(written[other])
        else:
            shutil.copyfile(weights.folder / other, target / other)
    shards = {
        shard: [tensor for tensor in tensors if tensor.source.file == file.path]
        for shard, file in weights.shards.items()
    }
    # No index names a file that only had scales.
    shards = {shard: some for shard, some in shards.items() if some}
    begins = [begin for shard, some in shards.items() for begin in _begin_shard(target / shard, some)]
    with Progress(f"{name} in bfloat16", total, "bytes") as progress:

        def write(begin: tuple[_Tensor, Path, int]) -> None:
            _write_tensor(*begin)
            progress.advance(begin[0].bytes)

        in_threads(begins, write, threads)
    return [*weights.others, *shards]


def _begin_shard(path: Path, tensors: list[_Tensor]) -> list[tuple[_Tensor, Path, int]]:
    """Write a file's header, and return each tensor with the file and the place of its bytes in it.

    Tensors of larger numbers come first, so that each begins where its numbers may (as the safetensors package does).
    """
    tensors = sorted(tensors, key=lambda tensor: -(tensor.bytes // max(1, math.prod(tensor.source.entry.shape))))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers asks for it
    begins, end = [], 0
    for tensor in tensors:
        entry, begin, end = tensor.source.entry, end, end + tensor.bytes
        dtype = BFLOAT16 if tensor.scales else entry.dtype
        header[entry.name] = {"dtype": dtype, "shape": entry.shape, "data_offsets": [begin, end]}
        begins.append(begin)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    first = LENGTH_BYTES + len(text)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(LENGTH_BYTES, "little") + text)
        file.truncate(first + end)
    return [(tensor, path, first + begin) for tensor, begin in zip(tensors, begins, strict=True)]


def _write_tensor(tensor: _Tensor, path: Path, begin: int) -> None:
    with tensor.source.file.open("rb") as source, path.open("r+b") as target:
        source.seek(tensor.source.entry.begin)
        target.seek(begin)
        if tensor.scales:
            for piece in _pieces(tensor, _numbers(tensor.scales), source):
                target.write(piece.tobytes())
        else:
            for start in range(0, tensor.bytes, BUFFER):
                target.write(tensor.source.read(source, min(BUFFER, tensor.bytes - start)))


def _pieces(tensor: _Tensor, scales: NDArray[np.float32], source: BinaryIO) -> Iterator[NDArray[np.uint16]]:
    """Yield the bits of a weight in bfloat16, some rows at a time. source: its file, at its first byte."""
    rows, columns = tensor.source.entry.shape[-2:]
    high, wide = tensor.block
    step = max(1, PIECE // columns)
    for grid in scales.reshape(-1, math.ceil(rows / high), math.ceil(columns / wide)):
        for top, of_blocks in zip(range(0, rows, high), grid, strict=True):
            by_column = np.repeat(of_blocks, wide)[:columns]
            below = min(top + high, rows)
            for row in range(top, below, step):
                read = tensor.source.read(source, min(step, below - row) * columns)
                codes = np.frombuffer(read, np.uint8).reshape(-1, columns)
                with np.errstate(over="ignore", invalid="ignore"):
                    piece = to_bfloat16(E4M3[codes] * by_column)
                if (piece & 0x7FFF).max() > LARGEST:
                    is_nan = (codes & 0x7F == 0x7F).any()
                    fault = "NaN" if is_nan else "a number that is infinite in bfloat16 with its scale"
                    raise tensor.source.wrong(f"holds {fault}")
                yield piece


def _numbers(scales: _Stored) -> NDArray[np.float32]:
    """Return the scales in float32; raises VlmflowError if one is no number from 0 on."""
    entry = scales.entry
    with scales.file.open("rb") as file:
        file.seek(entry.begin)
        read = scales.read(file, entry.end - entry.begin)
    if entry.dtype == BFLOAT16:
        numbers = (np.frombuffer(read, np.uint16).astype(np.uint32) << 16).view(np.float32)
    else:
        numbers = np.frombuffer(read, np.float32 if entry.dtype == "F32" else np.float16).astype(np.float32)
    if wrong := [float(number) for number in numbers[~((numbers >= 0) & (numbers < np.inf))][:1]]:
        raise scales.wrong(f"holds {wrong[0]}; a scale must be a number from 0 on")
    return numbers
