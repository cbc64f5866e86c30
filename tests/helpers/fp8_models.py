"""Small models in FP8, in the form of those that Qwen publishes."""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from vlmflow.fetch.model_files import CONFIG, INDEX

LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The linear layers, which are in FP8; all else is in bfloat16."""


def in_fp8(folder: Path, block: tuple[int, int] | None, scales: torch.dtype = torch.float32) -> Path:
    """Turn a model's weights into FP8, in place, and return its folder.

    block: the rows and columns that share a scale; None: all of the matrix, whose scale is one number, and a scale for
    the layer's inputs beside it. Each weight's scales go into the next shard: the hub's models have such, too.
    """
    shards = sorted(folder.glob("*.safetensors"))
    made: dict[Path, dict[str, torch.Tensor]] = {shard: {} for shard in shards}
    for shard, after in zip(shards, [*shards[1:], shards[0]], strict=True):
        for name, tensor in load_file(shard).items():
            if name.split(".")[-2] not in LAYERS:
                made[shard][name] = tensor.bfloat16()
                continue
            made[shard][name], made[after][f"{name}_scale_inv"] = quantised(tensor, block, scales)
            if block is None:
                made[after][name.removesuffix("weight") + "activation_scale"] = torch.tensor(0.5)
    for shard, tensors in made.items():
        save_file(tensors, shard, {"format": "pt"})
    if len(shards) > 1:
        places = {name: shard.name for shard, tensors in made.items() for name in tensors}
        (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": places}))
    config = json.loads((folder / CONFIG).read_text()) | {"dtype": "bfloat16"}
    how: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic" if block else "static"}
    config["quantization_config"] = how | {"fmt": "e4m3", "weight_block_size": block}
    (folder / CONFIG).write_text(json.dumps(config, indent=2))
    return folder


def quantised(
    tensor: torch.Tensor, block: tuple[int, int] | None, scales: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a matrix in FP8, and its scales."""
    rows, columns = tensor.shape
    high, wide = block or (rows, columns)
    grid = torch.empty(math.ceil(rows / high), math.ceil(columns / wide))
    codes = torch.empty(tensor.shape, dtype=torch.float8_e4m3fn)
    for row in range(grid.shape[0]):
        for column in range(grid.shape[1]):
            part = slice(row * high, (row + 1) * high), slice(column * wide, (column + 1) * wide)
            grid[row, column] = (tensor[part].float().abs().max() / 448).to(scales)
            codes[part] = (tensor[part].float() / grid[row, column]).to(torch.float8_e4m3fn)
    return codes, grid.to(scales) if block else grid[0, 0].to(scales)
