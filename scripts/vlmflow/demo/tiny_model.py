"""Makes a tiny Qwen3-VL (or Qwen3) with random weights, with the files and the layout of a real one, offline."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmflow.core.files import whole_folder
from vlmflow.demo.tiny_tokenizer import (
    CHAT_TEMPLATE,
    FIRST_SPECIAL_ID,
    SPECIAL_TOKENS,
    VOCABULARY_SIZE,
    write_tokenizer,
)
from vlmflow.swift.quick_imports import quick_imports

with quick_imports():
    import torch
    from transformers import (
        PreTrainedModel,
        Qwen3Config,
        Qwen3ForCausalLM,
        Qwen3VLConfig,
        Qwen3VLForConditionalGeneration,
    )

ID = {token: FIRST_SPECIAL_ID + number for number, token in enumerate(SPECIAL_TOKENS)}

PATCH = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2}
"""Qwen3-VL's own: one token for 2 × 2 patches of 16 × 16 pixels."""

PIXELS_PER_TOKEN = 32 * 32

LOGIT_SPREAD = 2.5
"""Standard deviation of the untrained model's logits. The embedding is also the output layer: with the usual 0.02 all
logits are near zero, and an adapter on the layers below cannot raise any of them."""


@dataclass(frozen=True)
class TinyShape:
    """The sizes of the model.

    hidden_size: width of the language model.
    layers: decoder layers.
    merges: merges of the tokenizer, in addition to 256 bytes.
    """

    hidden_size: int = 128
    layers: int = 2
    merges: int = 512


def write_tiny_model(folder: Path, texts: Iterable[str], shape: TinyShape, seed: int, vision: bool = True) -> None:
    """Write a model folder as from_pretrained reads it: bfloat16 weights in two shards, tokenizer, processor.

    texts: texts like those that the model will read and write; its tokenizer is learned from them.
    vision: True for a Qwen3-VL, False for a Qwen3.

    The same arguments give the same bytes.
    """
    with whole_folder(folder) as part:
        ids = write_tokenizer(part, texts, shape.merges)
        if vision:
            _write_processor(part)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = _vision_model(shape) if vision else Qwen3ForCausalLM(Qwen3Config(**_text_config(shape)))
            _spread_embedding(model, ids)
        model.generation_config.update(
            do_sample=False,
            pad_token_id=ID["<|endoftext|>"],
            eos_token_id=[ID["<|im_end|>"], ID["<|endoftext|>"]],
        )
        model.to(torch.bfloat16)
        # Half of the decoder does not fit into the first shard: an adapter touches both.
        first_shard = _bytes_of(model) - _bytes_of(model.get_decoder().layers) // 2
        model.save_pretrained(part, max_shard_size=first_shard)
        for file in part.iterdir():
            file.chmod(0o644)  # safetensors files are readable only by their owner


def _bytes_of(module: torch.nn.Module) -> int:
    return sum(weight.nbytes for weight in module.parameters())


def _vision_model(shape: TinyShape) -> PreTrainedModel:
    return Qwen3VLForConditionalGeneration(
        Qwen3VLConfig(
            text_config=_text_config(shape, mrope_section=[8, 4, 4], mrope_interleaved=True),
            vision_config={
                "depth": 2,
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_heads": 2,
                "in_channels": 3,
                "patch_size": PATCH["patch_size"],
                "spatial_merge_size": PATCH["merge_size"],
                "temporal_patch_size": PATCH["temporal_patch_size"],
                "out_hidden_size": shape.hidden_size,
                "num_position_embeddings": 64,
                "deepstack_visual_indexes": [0],
            },
            image_token_id=ID["<|image_pad|>"],
            video_token_id=ID["<|video_pad|>"],
            vision_start_token_id=ID["<|vision_start|>"],
            vision_end_token_id=ID["<|vision_end|>"],
            tie_word_embeddings=True,
        )
    )


def _text_config(shape: TinyShape, **rope: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": shape.hidden_size,
        "intermediate_size": 2 * shape.hidden_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6,
        "initializer_range": shape.hidden_size**-0.5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5_000_000.0, **rope},
        "tie_word_embeddings": True,
        "bos_token_id": ID["<|endoftext|>"],
        "eos_token_id": ID["<|im_end|>"],
        "pad_token_id": ID["<|endoftext|>"],
    }


def _spread_embedding(model: PreTrainedModel, ids: list[int]) -> None:
    """Draw the rows of used tokens, and one common row for all others.

    Training learns at once to avoid a single row; 150,000 different ones, or zeros, would keep most of the probability
    for long.
    """
    weight = model.get_input_embeddings().weight
    spread = LOGIT_SPREAD / weight.shape[1] ** 0.5
    with torch.no_grad():
        weight.copy_(torch.randn(weight.shape[1]) * spread)
        weight[torch.tensor(ids)] = torch.randn(len(ids), weight.shape[1]) * spread


def _write_processor(folder: Path) -> None:
    """Write the processor files of a Qwen3-VL checkpoint."""
    common = {
        **PATCH,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "processor_class": "Qwen3VLProcessor",
    }
    files = {
        "preprocessor_config.json": {
            **common,
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "size": {"shortest_edge": 4 * PIXELS_PER_TOKEN, "longest_edge": 64 * PIXELS_PER_TOKEN},
        },
        "video_preprocessor_config.json": {
            **common,
            "video_processor_type": "Qwen3VLVideoProcessor",
            "size": {"shortest_edge": 4 * PIXELS_PER_TOKEN, "longest_edge": 256 * PIXELS_PER_TOKEN},
        },
        "chat_template.json": {"chat_template": CHAT_TEMPLATE},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1) + "\n")
