"""Small base models of other families than Qwen3: layout, special tokens and chat form are those of published ones."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

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

LLAMA_TOKENS = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")


@dataclass(frozen=True)
class Family:
    """A family of text models.

    kind: the class of its configuration. model_type, template: ms-swift's names. special: its special tokens; the first
    begins a text, the second pads, the last one ends an answer.
    """

    kind: type[PreTrainedConfig]
    model_type: str
    template: str
    special: tuple[str, ...]


FAMILIES = {
    "llama": Family(LlamaConfig, "llama", "llama3", LLAMA_TOKENS),
    "mistral": Family(MistralConfig, "mistral", "llama", ("<s>", "<unk>", "</s>")),
    "qwen2.5": Family(Qwen2Config, "qwen2", "qwen2_5", ("<|bos|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>")),
    "gemma2": Family(Gemma2Config, "gemma2", "gemma", ("<bos>", "<pad>", "<start_of_turn>", "<eos>", "<end_of_turn>")),
    "phi3": Family(Phi3Config, "phi3", "phi3", ("<s>", "<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>")),
}


def write_family(name: str, folder: Path) -> Path:
    """Write a model of a family with 50,000 weights in several shards, and return its folder.

    Its chat template is that of Llama 3 in any case.
    """
    torch.manual_seed(1)
    family = FAMILIES[name]
    tokenizer = made_tokenizer(family.special)
    config = family.kind(
        vocab_size=len(tokenizer),
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
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
