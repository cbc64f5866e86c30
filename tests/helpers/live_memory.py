"""Keeps of a Qwen3-VL on the CPU the tensors that a GPU keeps."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from transformers.models.qwen3_vl import modeling_qwen3_vl

from vlmflow.estimate.fake_pass import as_on_cuda


@contextmanager
def with_pictures_as_on_cuda(mask: torch.dtype | None) -> Iterator[None]:
    """Do what `as_on_cuda` does; the tower's attention is one kernel over all pictures."""
    with (
        as_on_cuda(mask),
        patch.object(modeling_qwen3_vl, "create_causal_mask", lambda *_, **__: None),
        patch.object(modeling_qwen3_vl, "is_flash_attention_requested", lambda config: True),
        patch.object(modeling_qwen3_vl, "get_max_seqlen", lambda *_, **__: 0),
    ):
        yield
