"""Makes a byte-level BPE tokenizer like Qwen3's, with few merges, learned from the text it will be used on.

Split, special tokens, their ids and the chat form are those of Qwen3 and Qwen3-VL
(https://huggingface.co/Qwen/Qwen3-VL-32B-Instruct: tokenizer.json, tokenizer_config.json).
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from vlmflow.raw.json_file import JsonRows
from vlmflow.rows.forms.fire import read_trajectory
from vlmflow.rows.rejects import Reject

QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Qwen splits text before it merges bytes: contractions, words, single digits, marks, white space."""

FIRST_SPECIAL_ID = 151_643
"""The id of <|endoftext|> in Qwen3. ms-swift has the ids 151655 (<|image_pad|>) and 151656 hard-coded, so the tiny
vocabulary has a gap below this id."""

SPECIAL_TOKENS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
OTHER_ADDED_TOKENS = [
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
]
ADDED_TOKENS = (*SPECIAL_TOKENS, *OTHER_ADDED_TOKENS)
"""In the order of their ids."""

VOCABULARY_SIZE = -(-(FIRST_SPECIAL_ID + len(ADDED_TOKENS)) // 8) * 8
"""Rows of the embedding: the number of ids, rounded up to a multiple of 8."""

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


def write_tokenizer(folder: Path, texts: Iterable[str], merges: int) -> list[int]:
    """Learn up to `merges` merges from the texts and write tokenizer.json and tokenizer_config.json.

    Returns the ids of tokens, ascending: 256 bytes, the merges, and Qwen's added tokens.
    """
    tokenizer = _learn(texts, merges)
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
    return sorted(tokenizer.get_vocab().values())


def _learn(texts: Iterable[str], merges: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=len(alphabet) + merges, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    # An added token gets the next free id, unless the model's vocabulary already has it.
    content = json.loads(tokenizer.to_str())
    content["model"]["vocab"] |= {token: FIRST_SPECIAL_ID + i for i, token in enumerate(ADDED_TOKENS)}
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in OTHER_ADDED_TOKENS])
    return tokenizer
