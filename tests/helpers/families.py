"""Small base models of other families than Qwen3: layout, special tokens and chat form are those of published ones."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4Config,
    Glm4MoeConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
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
{{- date_string + '\\n\\n' -}}
{%- if messages[0].role == 'system' -%}
{{- messages[0].content -}}
{%- set messages = messages[1:] -%}
{%- endif -%}
{{- '<|eot_id|>' -}}
{%- for message in messages -%}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content + '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
{%- endif -%}
"""
"""As Meta publishes it, without tools: it writes the date."""

CHATML_TOKENS = ("<|bos|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>")
GEMMA_TOKENS = ("<bos>", "<pad>", "<start_of_turn>", "<eos>", "<end_of_turn>")
GLM_4_TOKENS = ("<sop>", "<|system|>", "<|assistant|>", "<|observation|>", "<|endoftext|>", "<|user|>")
GPT_OSS_TOKENS = (
    "<|startoftext|>",
    "<|endoftext|>",
    "<|start|>",
    "<|message|>",
    "<|channel|>",
    "<|end|>",
    "<|return|>",
)
GLM_TOKENS = ("[gMASK]", "<|endoftext|>", "<sop>", "<|system|>", "<|assistant|>", "<think>", "</think>", "<|user|>")
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
    "glm4-moe": Family(Glm4MoeConfig, "glm4_moe", "glm4_5", GLM_TOKENS, experts=4),
    "gemma2": Family(Gemma2Config, "gemma2", "gemma", GEMMA_TOKENS),
    "mixtral": Family(MixtralConfig, "mixtral", "llama", ("<s>", "<unk>", "</s>"), experts=4),
    "gemma3-text": Family(Gemma3TextConfig, "gemma3_text", "gemma3_text", GEMMA_TOKENS),
    "gpt-oss": Family(GptOssConfig, "gpt_oss", "gpt_oss", GPT_OSS_TOKENS, experts=4),
    "phi4": Family(Phi3Config, "phi4", "phi4", ("<|bos|>", "<|pad|>", "<|im_start|>", "<|im_sep|>", "<|im_end|>")),
    "glm4": Family(Glm4Config, "glm4", "glm4", ("[gMASK]", "<|pad|>", *GLM_4_TOKENS)),
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
    experts |= {"n_routed_experts": count, "first_k_dense_replace": 1} if count else {}
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


def made_tokenizer(
    special: Sequence[str], placed: Mapping[str, int] | None = None, **named: str
) -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes and few merges, with special tokens.

    placed: special tokens by their number. named: special tokens by their name (image_token).
    """
    plain = Tokenizer(models.BPE())
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    plain.train_from_iterator(["Say it again, and again. It is so."], trainer)
    if placed:
        form = json.loads(plain.to_str())
        number_of = {number: token for token, number in form["model"]["vocab"].items()}
        moved = {number_of[number]: len(number_of) + number for number in placed.values() if number in number_of}
        form["model"]["vocab"] |= moved | placed
        plain = Tokenizer.from_str(json.dumps(form))
    ends = {"bos_token": special[0], "eos_token": special[-1], "pad_token": special[1]}
    extra = [*special, *(placed or {})]
    made = PreTrainedTokenizerFast(tokenizer_object=plain, extra_special_tokens=extra, **ends, **named)
    made.chat_template = LLAMA_3
    return made


def write_gpt2(folder: Path, more_tokens: Sequence[str] = ()) -> Path:
    """Write a GPT-2 with tied embeddings, as its first owner publishes it: no chat template, no bos before a text."""
    torch.manual_seed(1)
    tokenizer = made_tokenizer(("<|endoftext|>",) * 3)
    tokenizer.add_tokens([AddedToken(token, special=True) for token in more_tokens])
    tokenizer.chat_template = None
    end = tokenizer.eos_token_id
    config = GPT2Config(n_embd=48, n_layer=2, n_head=4, vocab_size=len(tokenizer), n_positions=1024, eos_token_id=end)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder, max_shard_size="60KB")
    tokenizer.save_pretrained(folder)
    return folder
