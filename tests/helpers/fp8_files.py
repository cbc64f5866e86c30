"""Files of models in FP8, written without torch."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from vlmflow.fetch.model_files import CONFIG, INDEX, SINGLE

Tensors = dict[str, tuple[str, np.ndarray]]
"""Tensors by name: the format's name of the type, and the bits."""

WEIGHT, SCALE = "model.a.weight", "model.a.weight_scale_inv"
ONE, TWO = "one.safetensors", "two.safetensors"


def random_codes(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 127, shape, np.uint8)


def made_model() -> dict[str, Tensors]:
    """A weight of 5 × 7 in blocks of 2 × 3 with its scales in another file, experts of 2 × 4 × 3, and others."""
    numbers = np.random.default_rng(2)
    return {
        ONE: {WEIGHT: ("F8_E4M3", random_codes(5, 7)), "odd": ("U8", np.arange(3, dtype=np.uint8))},
        TWO: {
            SCALE: ("F32", numbers.random((3, 3), np.float32)),
            "experts.up": ("F8_E4M3", random_codes(2, 4, 3)),
            "experts.up_scale_inv": ("F32", numbers.random((2, 2, 1), np.float32)),
            "norm.weight": ("BF16", np.arange(4, dtype=np.uint16)),
        },
    }


def write(folder: Path, shards: dict[str, Tensors], **quantisation: Any) -> Path:
    """Write a model, and return its folder. quantisation: keys of its config.json that differ."""
    folder.mkdir(exist_ok=True)
    for shard, tensors in shards.items():
        header, content = {}, b""
        for name, (dtype, bits) in tensors.items():
            place = [len(content), len(content) + bits.nbytes]
            header[name] = {"dtype": dtype, "shape": bits.shape, "data_offsets": place}
            content += bits.tobytes()
        described = json.dumps(header).encode()
        (folder / shard).write_bytes(len(described).to_bytes(8, "little") + described + content)
    if SINGLE not in shards:
        places = {name: shard for shard, tensors in shards.items() for name in tensors}
        (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 7}, "weight_map": places}))
    how = {"quant_method": "fp8", "weight_block_size": [2, 3]} | quantisation
    (folder / CONFIG).write_text(json.dumps({"hidden_size": 8, "quantization_config": how}))
    (folder / "merges.txt").write_text("a b\n")
    return folder
