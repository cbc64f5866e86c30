"""Small base models of other families than Qwen3: layout, special tokens and chat form are those of published ones."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    CLIPImageProcessor,
    CLIPVisionConfig,
    Gemma2Config,
    LlamaConfig,
    LlavaConfig,
    LlavaProcessor,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from vlmflow.demo.tiny_model import ID
from vlmflow.demo.tiny_tokenizer import CHAT_TEMPLATE, VOCABULARY_SIZE, write_tokenizer

LLAMA_3 = """\
{{- bos_token -}}
{%- for message in messages -%}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content + '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
{%- endif -%}
"""

LLAMA_3_2 = """\
{{- bos_token -}}
{%- if strftime_now is defined -%}
{%- set date_string = strftime_now("%d %b %Y") -%}
{%- else -%}
{%- set date_string = "26 Jul 2024" -%}
{%- endif -%}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nCutting Knowledge Date: December 2023\\nToday Date: ' -}}
{{- date_string + '\\n\\n<|eot_id|>' -}}
{%- for message in messages -%}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content + '<|eot_id|>' -}}
{%- endfor -%}
"""
"""As Meta publishes it for a dialogue without a system turn: it writes the date."""

CHATML_TOKENS = ("<|bos|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>")
LLAMA_TOKENS = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")


@dataclass(frozen=True)
class Family:
    """A family of text models.

    kind: the class of its configuration. model_type, template: ms-swift's names. special: its special tokens; the first
    begins a text, the second pads, the last one ends an answer. experts: of each layer.
    """

    kind: type[PreTrainedConfig]
    model_type: str
    template: str
    special: tuple[str, ...]
    experts: int = 0


FAMILIES = {
    "llama": Family(LlamaConfig, "llama", "llama3", LLAMA_TOKENS),
    "mistral": Family(MistralConfig, "mistral", "llama", ("<s>", "<unk>", "</s>")),
    "qwen2.5": Family(Qwen2Config, "qwen2", "qwen2_5", CHATML_TOKENS),
    "qwen3": Family(Qwen3Config, "qwen3", "qwen3_nothinking", CHATML_TOKENS),
    "qwen3-moe": Family(Qwen3MoeConfig, "qwen3_moe", "qwen3_nothinking", CHATML_TOKENS, experts=4),
    "gemma2": Family(Gemma2Config, "gemma2", "gemma", ("<bos>", "<pad>", "<start_of_turn>", "<eos>", "<end_of_turn>")),
    "mixtral": Family(MixtralConfig, "mixtral", "llama", ("<s>", "<unk>", "</s>"), experts=4),
    "phi3": Family(Phi3Config, "phi3", "phi3", ("<s>", "<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>")),
}


def write_family(name: str, folder: Path) -> Path:
    """Write a model of a family with 50,000 weights in several shards, and return its folder.

    Its chat template is that of Llama 3 in any case.
    """
    torch.manual_seed(1)
    family = FAMILIES[name]
    tokenizer = made_tokenizer(family.special)
    count = family.experts
    experts = {"num_experts": count, "num_local_experts": count, "num_experts_per_tok": 2} if count else {}
    config = family.kind(
        vocab_size=len(tokenizer),
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        **experts,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder, max_shard_size="60KB")
    tokenizer.save_pretrained(folder)
    return folder


def made_tokenizer(special: Sequence[str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes and few merges, with special tokens."""
    plain = Tokenizer(models.BPE())
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    plain.train_from_iterator(["Say it again, and again. It is so."], trainer)
    named = {"bos_token": special[0], "eos_token": special[-1], "pad_token": special[1]}
    made = PreTrainedTokenizerFast(tokenizer_object=plain, extra_special_tokens=list(special), **named)
    made.chat_template = LLAMA_3
    return made


TINY_TEXT = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def write_qwen2_5_vl(folder: Path) -> Path:
    """Write a Qwen2.5-VL, whose picture limits are `min_pixels` and `max_pixels`, and return its folder."""
    torch.manual_seed(1)
    folder.mkdir(parents=True)
    write_tokenizer(folder, ["What colour is the square? It is red, and so is the other one."], 40)
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 2, 2]}
    text = TINY_TEXT | HEADS | {"vocab_size": VOCABULARY_SIZE, "rope_parameters": rope, "tie_word_embeddings": False}
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 48}
    vision |= {"window_size": 56, "fullatt_block_indexes": [1]}
    ids = {"image_token_id": ID["<|image_pad|>"], "video_token_id": ID["<|video_pad|>"]}
    ids |= {"vision_start_token_id": ID["<|vision_start|>"], "vision_end_token_id": ID["<|vision_end|>"]}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False, **ids)
    _save(AutoModelForImageTextToText.from_config(config), folder)
    common = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2, "processor_class": "Qwen2_5_VLProcessor"}
    common |= {"min_pixels": 3136, "max_pixels": 12_845_056, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    for name, kind in (("preprocessor", "image_processor"), ("video_preprocessor", "video_processor")):
        which = {"image_processor": "Qwen2VLImageProcessor", "video_processor": "Qwen2VLVideoProcessor"}[kind]
        (folder / f"{name}_config.json").write_text(json.dumps(common | {f"{kind}_type": which}))
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    return folder


def write_llava(folder: Path) -> Path:
    """Write a LLaVA 1.5, whose pictures have a fixed number of tokens (4), and return its folder."""
    torch.manual_seed(1)
    tokenizer = made_tokenizer(("<s>", "<unk>", "<image>", "</s>"))
    text = LlamaConfig(**TINY_TEXT, **HEADS, vocab_size=len(tokenizer), bos_token_id=0, eos_token_id=1)
    vision = CLIPVisionConfig(**TINY_TEXT, num_attention_heads=4, image_size=28, patch_size=14, projection_dim=48)
    image = tokenizer.convert_tokens_to_ids("<image>")
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_id=image, image_seq_length=4)
    _save(AutoModelForImageTextToText.from_config(config), folder)
    scale = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
    LlavaProcessor(
        image_processor=CLIPImageProcessor(**scale),
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        chat_template=LLAVA,
        image_token="<image>",  # noqa: S106 (a mark)
        num_additional_image_tokens=1,
    ).save_pretrained(folder)
    return folder


LLAVA = """\
{%- for message in messages -%}
{{- 'USER: ' if message.role == 'user' else 'ASSISTANT: ' if message.role == 'assistant' else '' -}}
{%- if message.content is string -%}
{{- message.content -}}
{%- else -%}
{%- for part in message.content -%}
{{- '<image>\\n' if part.type == 'image' else part.text -}}
{%- endfor -%}
{%- endif -%}
{{- '</s>' if message.role == 'assistant' else ' ' -}}
{%- endfor -%}
"""


def _save(model: PreTrainedModel, folder: Path) -> None:
    model.save_pretrained(folder, max_shard_size="60KB")
