"""Rows as a model's inputs, and attention that keeps those of one sequence apart, without a mask and without padding.

In a file of tensors `row.N.NAME` is an input of row N as the model's `forward` takes it, made by ms-swift's template
and collator. Beside them may stand `row.N.logits`.

ms-swift's `padding_free` puts the rows of a micro-batch into one sequence and tells attention where each begins
(`cu_seq_lens_q`). In transformers 5.19 flash attention alone reads that. With sdpa each row of Qwen3-VL would see those
before it, and train wrongly without an error; text models would get a mask of tokens × tokens. Our attention works on
the CPU, too; whether the rows of a batch may stand in one sequence depends on ms-swift's template and the model.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from swift.utils import get_packed_seq_params
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

SDPA = "sdpa"
"""The attention among transformers' own that is replaced."""

ROWS = "cu_seq_lens_q"
"""The argument that says where each row of a sequence begins, and where the last one ends."""

FOR_FLASH = ("cu_seq_lens_k", "max_length_q", "max_length_k")
"""What flash attention wants besides."""


NOT_INPUTS = ("labels", "loss_scale", "channel", "text_position_ids")
"""What a batch of ms-swift has besides the model's inputs."""

NOT_STORED = ("position_ids", ROWS, *FOR_FLASH)
"""The inputs that a model computes from the others for a single row: positions, and where the row begins and ends."""

Inputs = dict[str, torch.Tensor]
"""The inputs of a model for one row, by name."""


def in_one_sequence(trainer: Any) -> None:
    """Let the rows of each micro-batch of ms-swift's trainer stand in one sequence, without padding, from now on."""
    trainer.template.padding_free = True  # ms-swift refuses the argument without flash attention
    if trainer.model.config._attn_implementation == SDPA:
        keep_rows_apart()
        trainer.data_collator = NamesRows(trainer.data_collator)


class NamesRows:
    """A collator that also says where rows begin, in numbers: a tensor would be waited for in every layer."""

    def __init__(self, collate: Any) -> None:
        self._collate = collate

    def __call__(self, rows: list[Any]) -> dict[str, Any]:
        """Make a micro-batch of encoded rows."""
        batch: dict[str, Any] = self._collate(rows)
        begins = batch.get(ROWS)
        if begins is None:  # ms-swift's templates of text models
            begins = get_packed_seq_params(batch["position_ids"])[ROWS]
        return {name: value for name, value in batch.items() if name not in FOR_FLASH} | {ROWS: begins.tolist()}


def keep_rows_apart() -> None:
    """Let sdpa, from now on and in this process, attend within each row of a sequence of several."""
    plain = ALL_ATTENTION_FUNCTIONS[SDPA]
    mask = ALL_MASK_ATTENTION_FUNCTIONS[SDPA]

    def mask_of_padding(*sizes: Any, attention_mask: Any = None, **options: Any) -> Any:
        return None if attention_mask is None else mask(*sizes, attention_mask=attention_mask, **options)

    def attention(module: Any, query: Any, key: Any, value: Any, attention_mask: Any = None, **options: Any) -> Any:
        """Attend as transformers' functions do. query, key, value: rows × heads × tokens × width.

        Without ROWS, in plain batches and in the tower, attention is within the whole sequence.
        """
        begins: Sequence[int] | None = options.pop(ROWS, None)
        if begins is None:
            return plain(module, query, key, value, attention_mask, **options)
        if options.get("sliding_window"):
            raise RuntimeError("a layer attends to a window; rows of one sequence would need a mask")
        parts = [
            plain(module, *(each[:, :, begin:end] for each in (query, key, value)), None, **options)[0]
            for begin, end in pairwise(begins)
        ]
        return torch.cat(parts, dim=1), None

    ALL_ATTENTION_FUNCTIONS.register(SDPA, attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(SDPA, mask_of_padding)


def row_tensors(number: int, batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the inputs of a batch of one row by their names in a file. number: of the row there."""
    return {
        f"row.{number}.{name}": value.contiguous().cpu()
        for name, value in batch.items()
        if isinstance(value, torch.Tensor) and name not in NOT_INPUTS + NOT_STORED
    }


def rows_in(tensors: Mapping[str, torch.Tensor]) -> list[Inputs]:
    """Return the tensors of each row by their own names, in the order of the rows."""
    rows: dict[int, Inputs] = {}
    for key, tensor in tensors.items():
        _, number, name = key.split(".")
        rows.setdefault(int(number), {})[name] = tensor
    return [rows[number] for number in sorted(rows)]


def joins_rows(template: Any) -> bool:
    """Return whether ms-swift's template can join rows, and each layer of the model attends to all of a row by sdpa.

    Rows that stand behind each other need a mask where a layer attends to a window, or eagerly; a state that goes from
    token to token would go on into the next row.
    """
    from vlmflow.swift.meta_model import class_of

    supported = template.support_padding_free
    if supported is None:  # as ms-swift decides (pipelines/train/sft.py)
        supported = not template.model_meta.is_multimodal
    text = template.config.get_text_config()
    layers = getattr(text, "layer_types", None)
    if layers is None:  # one window for all layers, such as Qwen3-MoE's
        layers = [] if getattr(text, "sliding_window", None) is None else ["sliding_attention"]
    kind = class_of(template.config)
    return bool(supported) and kind is not None and kind._supports_sdpa and set(layers) <= {"full_attention"}
