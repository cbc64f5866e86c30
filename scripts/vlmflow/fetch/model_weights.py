"""Finds the files of a model's weights, and the tensors in each."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import read_json
from vlmflow.fetch.model_files import CONFIG, FETCH_AGAIN, INDEX, SINGLE
from vlmflow.fetch.quantised import refuse_quantised
from vlmflow.fetch.safetensors_header import SafetensorsFile, TensorEntry, read_header

WEIGHT_SUFFIXES = (
    ".bin",
    ".ckpt",
    ".gguf",
    ".h5",
    ".index.json",
    ".msgpack",
    ".onnx",
    ".onnx_data",
    ".pt",
    ".pth",
    ".safetensors",
    ".tflite",
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
    config = _config(folder, files, dequantize)
    weight_map = _weight_map(folder, files)
    shards = {name: read_header(folder / name) for name in sorted(set(weight_map.values()) or {SINGLE})}
    _refuse_doubled_tensors(shards)
    if weight_map:
        _compare_with_index(folder / INDEX, weight_map, shards)
    rest = set(files) - set(shards)
    left_out = {name for name in rest if name != INDEX and name.endswith(WEIGHT_SUFFIXES)}
    return ModelWeights(folder, config, shards, sorted(rest - left_out), sorted(left_out))


def _config(folder: Path, files: Collection[str], dequantize: bool) -> dict[str, Any]:
    path = folder / CONFIG
    if CONFIG not in files:
        raise VlmflowError(f"{path}: is missing", FETCH_AGAIN)
    return refuse_quantised(path, dequantize=dequantize)


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
    index = read_json(folder / INDEX)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not weight_map or not isinstance(weight_map, dict):
        raise VlmflowError(f"{folder / INDEX}: has no weight_map", FETCH_AGAIN)
    for tensor, name in weight_map.items():
        if name not in files:
            raise VlmflowError(f"{folder / INDEX}: {tensor} is in {name}, which is missing", FETCH_AGAIN)
    return weight_map


def _refuse_doubled_tensors(shards: dict[str, SafetensorsFile]) -> None:
    place: dict[str, str] = {}
    for name, shard in shards.items():
        for tensor in shard.tensors:
            if (other := place.setdefault(tensor, name)) != name:
                raise VlmflowError(
                    f"{shard.path}: tensor {tensor} is also in {other}, so it is unclear which one counts",
                    FETCH_AGAIN,
                )


def _compare_with_index(path: Path, weight_map: dict[str, str], shards: dict[str, SafetensorsFile]) -> None:
    stored = {(tensor, name) for name, shard in shards.items() for tensor in shard.tensors}
    listed = set(weight_map.items())
    for tensor, name in sorted(stored ^ listed):
        which = "is listed for" if (tensor, name) in listed else "is not listed, but is in"
        raise VlmflowError(f"{path}: tensor {tensor} {which} {name}: index and shards disagree", FETCH_AGAIN)
