"""Makes a byte-level BPE tokenizer like Qwen3's, with few merges, learned from the text it will be used on.

Split, special tokens, their ids and the chat form are those of Qwen3 and Qwen3-VL
(https://huggingface.co/Qwen/Qwen3-VL-32B-Instruct: tokenizer.json, tokenizer_config.json).

Makes a tiny Qwen3-VL (or Qwen3) with random weights, with the files and the layout of a real one, offline.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from vlmflow.core.files import whole_folder
from vlmflow.raw.json_file import JsonRows
from vlmflow.rows.chat import Reject
from vlmflow.rows.forms.fire import read_trajectory
from vlmflow.swift.child_process import quick_imports

QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Qwen splits text before it merges bytes: contractions, words, single digits, marks, white space."""

FIRST_SPECIAL_ID = 151_643
"""The id of <|endoftext|> in Qwen3. ms-swift has the ids 151655 (<|image_pad|>) and 151656 hard-coded, so a tiny model
that sees has a gap in its vocabulary below this id, whose logits take most of the time of a step."""

SPECIAL_TOKENS = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>"),
    *("<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
]
OTHER_ADDED_TOKENS = [
    *("<tool_call>", "</tool_call>"),
    *("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"),
    *("<tool_response>", "</tool_response>", "<think>", "</think>"),
]
ADDED_TOKENS = (*SPECIAL_TOKENS, *OTHER_ADDED_TOKENS)
"""In the order of their ids."""

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}
{{- message.content -}}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif part.type == 'video' -%}
{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
{%- else -%}
{{- part.text -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


def fire_texts(raw: Iterable[Path]) -> Iterator[str]:
    """Yield the questions, answers and feedback of the usable rows of raw FIRE files."""
    for path in raw:
        with JsonRows(path) as rows:
            for row in rows:
                trajectory = read_trajectory(row)
                if isinstance(trajectory, Reject):
                    continue
                yield trajectory.question
                for attempt in trajectory.attempts:
                    yield attempt.answer
                    yield attempt.feedback


def write_tokenizer(folder: Path, texts: Iterable[str], merges: int, gap: bool = True) -> dict[str, int]:
    """Learn up to `merges` merges from the texts and write tokenizer.json and tokenizer_config.json.

    gap: the added tokens have Qwen's own ids; otherwise they have the ids after those of the merges.
    Returns the ids by token: 256 bytes, the merges, and Qwen's added tokens.
    """
    tokenizer = _learn(texts, merges, gap)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "additional_special_tokens": SPECIAL_TOKENS[1:],
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 32_768,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
    return tokenizer.get_vocab()


def embedding_rows(ids: Mapping[str, int]) -> int:
    """Return the rows of an embedding for the ids of a tokenizer: up to the last one, and a multiple of 8."""
    return -(-(max(ids.values()) + 1) // 8) * 8


def _learn(texts: Iterable[str], merges: int, gap: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(QWEN_SPLIT), behavior="isolated")
    in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, in_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=len(alphabet) + merges, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    # An added token gets the next free id, unless the model's vocabulary already has it.
    content = json.loads(tokenizer.to_str())
    first = FIRST_SPECIAL_ID if gap else len(content["model"]["vocab"])
    content["model"]["vocab"] |= {token: first + i for i, token in enumerate(ADDED_TOKENS)}
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in OTHER_ADDED_TOKENS])
    return tokenizer


with quick_imports():
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3VLConfig, Qwen3VLForConditionalGeneration

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

    hidden_size: int = 64
    layers: int = 2
    merges: int = 512


def write_tiny_model(folder: Path, texts: Iterable[str], shape: TinyShape, seed: int, vision: bool = True) -> None:
    """Write a model folder as from_pretrained reads it: bfloat16 weights in two shards, tokenizer, processor.

    texts: texts like those that the model will read and write; its tokenizer is learned from them.
    vision: True for a Qwen3-VL, False for a Qwen3.

    The same arguments give the same bytes.
    """
    with whole_folder(folder) as part:
        ids = write_tokenizer(part, texts, shape.merges, gap=vision)
        if vision:
            _write_processor(part)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = _vision_model(shape, ids) if vision else Qwen3ForCausalLM(Qwen3Config(**_text_config(shape, ids)))
            _spread_embedding(model, sorted(ids.values()))
        model.generation_config.update(
            do_sample=False,
            pad_token_id=ids["<|endoftext|>"],
            eos_token_id=[ids["<|im_end|>"], ids["<|endoftext|>"]],
        )
        model.to(torch.bfloat16)
        # Half of the decoder does not fit into the first shard: an adapter touches both.
        first_shard = _bytes_of(model) - _bytes_of(model.get_decoder().layers) // 2
        model.save_pretrained(part, max_shard_size=first_shard)
        for file in part.iterdir():
            file.chmod(0o644)  # safetensors files are readable only by their owner


def _bytes_of(module: torch.nn.Module) -> int:
    return sum(weight.nbytes for weight in module.parameters())


def _vision_model(shape: TinyShape, ids: Mapping[str, int]) -> Any:
    return Qwen3VLForConditionalGeneration(
        Qwen3VLConfig(
            text_config=_text_config(shape, ids, mrope_section=[8, 4, 4], mrope_interleaved=True),
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
            image_token_id=ids["<|image_pad|>"],
            video_token_id=ids["<|video_pad|>"],
            vision_start_token_id=ids["<|vision_start|>"],
            vision_end_token_id=ids["<|vision_end|>"],
            tie_word_embeddings=True,
        )
    )


def _text_config(shape: TinyShape, ids: Mapping[str, int], **rope: Any) -> dict[str, Any]:
    return {
        "vocab_size": embedding_rows(ids),
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
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
    }


def _spread_embedding(model: Any, ids: list[int]) -> None:
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
