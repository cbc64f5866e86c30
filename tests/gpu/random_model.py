"""A Qwen3-VL of real shape with random weights, made on the computing device.

    python -m gpu.random_model FOLDER RAW SHAPE DEVICE

RAW: the FIRE rows that its tokenizer is learned from.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForImageTextToText, GenerationConfig, Qwen3VLConfig

from vlmflow.core.files import read_json, remove
from vlmflow.demo.tiny_model import TinyShape, fire_texts, write_tiny_model

SHARDS = 4
SEED = 42


@dataclass(frozen=True)
class Shape:
    """Differences from the demo's tiny model: values of text_config and of vision_config.

    tied: whether the embedding is also the output layer.
    """

    text: dict[str, Any]
    vision: dict[str, Any]
    tied: bool


COMMON = {
    "vocab_size": 151_936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "initializer_range": 0.02,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 5_000_000.0,
        "mrope_interleaved": True,
        "mrope_section": [24, 20, 20],
    },
}

SHAPES = {
    "2b": Shape(
        COMMON | {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
        {
            "depth": 24,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_heads": 16,
            "out_hidden_size": 2048,
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": [5, 11, 17],
        },
        tied=True,
    ),
    "8b": Shape(
        COMMON | {"hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36, "num_attention_heads": 32},
        {
            "depth": 27,
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_heads": 16,
            "out_hidden_size": 4096,
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": [8, 16, 24],
        },
        tied=False,
    ),
}
"""Those of Qwen3-VL-2B-Instruct and 8B-Instruct (their config.json)."""

TINY = "tiny"
"""The demo's model, for a CPU."""


def write_random_model(folder: Path, raw: Path, shape: str, device: str) -> None:
    """Write a model folder for from_pretrained, with bfloat16 weights drawn on `device`, in shards.

    raw: the FIRE rows that its tokenizer is learned from; tokenizer and processor are the tiny model's.
    shape: a key of SHAPES, or TINY.
    """
    write_tiny_model(folder, fire_texts([raw]), TinyShape(hidden_size=64), SEED)
    if shape == TINY:
        return
    differences = SHAPES[shape]
    config = read_json(folder / "config.json")
    config["text_config"] |= differences.text | {"tie_word_embeddings": differences.tied}
    config["vision_config"] |= differences.vision
    config["tie_word_embeddings"] = differences.tied
    for weights in folder.glob("model*.safetensors*"):
        remove(weights)
    torch.manual_seed(SEED)
    with torch.device(device):
        model = AutoModelForImageTextToText.from_config(Qwen3VLConfig.from_dict(config), dtype=torch.bfloat16)
    model.generation_config = GenerationConfig.from_pretrained(folder)
    model.save_pretrained(folder, max_shard_size=sum(weight.nbytes for weight in model.parameters()) // SHARDS)


if __name__ == "__main__":
    write_random_model(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4])
