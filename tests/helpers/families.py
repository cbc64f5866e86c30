"""Small base models of other families than Qwen3, with the layout, special tokens and chat form of the published ones."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

LLAMA_3 = """\
{{- bos_token -}}
{%- for message in messages -%}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content + '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
{%- endif -%}
"""

LLAMA_TOKENS = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]


def write_llama(folder: Path) -> Path:
    """Write a Llama 3 of 60,000 weights, and return its folder."""
    torch.manual_seed(1)
    tokenizer = _tokenizer(LLAMA_TOKENS, LLAMA_3, bos_token="<|begin_of_text|>", eos_token="<|eot_id|>")
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="60KB")
    tokenizer.save_pretrained(folder)
    return folder


def _tokenizer(special: list[str], chat_template: str, **named: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes and few merges, with special tokens."""
    plain = Tokenizer(models.BPE())
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    plain.train_from_iterator(["Say it again, and again. It is so."], trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=plain, extra_special_tokens=special, pad_token=special[1], **named)
    made.chat_template = chat_template
    return made
