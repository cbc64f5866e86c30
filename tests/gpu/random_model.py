"""A Qwen3-VL of real size with random weights, made on the computing device."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForImageTextToText, GenerationConfig, Qwen3VLConfig

from vlmflow.core.files import read_json, remove
from vlmflow.demo.tiny_model import TinyShape, write_tiny_model
from vlmflow.demo.tiny_tokenizer import fire_texts

SHARDS = 4


@dataclass(frozen=True)
class Shape:
    """Differences from the demo's tiny model: values of text_config and of vision_config."""

    text: dict[str, Any] = field(default_factory=dict)
    vision: dict[str, Any] = field(default_factory=dict)


REAL = Shape(
    text={
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "initializer_range": 0.02,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5_000_000.0,
            "mrope_interleaved": True,
            "mrope_section": [24, 20, 20],
        },
    },
    vision={
        "depth": 24,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_heads": 16,
        "out_hidden_size": 2048,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [5, 11, 17],
    },
)
"""Qwen3-VL-2B-Instruct's own (its config.json), with 24 of its 28 decoder layers: 1.9 billion weights."""

SMALL = Shape()


def write_random_model(folder: Path, raw: Path, shape: Shape, device: str, seed: int) -> None:
    """Write a model folder for from_pretrained, with bfloat16 weights drawn on `device`, in shards.

    raw: the FIRE rows that its tokenizer is learned from; tokenizer and processor are the tiny model's.
    """
    write_tiny_model(folder, fire_texts([raw]), TinyShape(hidden_size=64), seed)
    config = read_json(folder / "config.json")
    config["text_config"] |= shape.text
    config["vision_config"] |= shape.vision
    for weights in folder.glob("model*.safetensors*"):
        remove(weights)
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForImageTextToText.from_config(Qwen3VLConfig.from_dict(config), dtype=torch.bfloat16)
    model.generation_config = GenerationConfig.from_pretrained(folder)
    model.save_pretrained(folder, max_shard_size=sum(weight.nbytes for weight in model.parameters()) // SHARDS)
