"""How many bytes of tensors PyTorch holds at its worst moment: real tensors, or fake ones without data.

torch.distributed._tools.mem_tracker measures the same, but refuses models with frozen weights (`register_hook`).
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3_vl import modeling_qwen3_vl

FUSED = "fused_as_on_cuda"
"""The name of our attention among transformers'."""


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that exist, from the first operation that returns them to their end."""

    def __init__(self, held: Iterable[torch.Tensor]) -> None:
        """held: what exists already; it does not count."""
        super().__init__()
        self._known: dict[int, int] = {}
        self.live = self.peak = 0
        for tensor in held:
            self.add(tensor)
        self.live = self.peak = 0

    def add(self, tensor: torch.Tensor) -> None:
        """Count the storage of a tensor from now on."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._known:
            self._known[key] = storage.nbytes()
            weakref.finalize(storage, self._remove, key)
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)

    def _remove(self, key: int) -> None:
        self.live -= self._known.pop(key)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.add(leaf)
        return result


class _Fused(torch.autograd.Function):
    """What flash attention keeps: its inputs, its result, and a number for each row and head."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        rows, heads, tokens, width = query.shape
        result = torch.empty(rows, tokens, heads, width, dtype=query.dtype).transpose(1, 2)
        ctx.save_for_backward(query, key, value, result, torch.empty(rows, heads, tokens))
        return result

    @staticmethod
    def backward(ctx: Any, *gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:3])


def _fused(module: Any, query: Any, key: Any, value: Any, attention_mask: Any = None, **options: Any) -> Any:
    if torch.is_autocast_enabled("cpu"):
        query, key, value = (each.to(torch.get_autocast_dtype("cpu")) for each in (query, key, value))
    return _Fused.apply(query, key, value).transpose(1, 2).contiguous(), None


def _dropout(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    return torch.native_dropout(x, p, True)[0] if training and p else x


def _layer_norm(plain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def in_float32(x: torch.Tensor, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Any:
        if not torch.is_autocast_enabled("cpu"):
            return plain(x, shape, weight, bias, eps)
        return plain(x.float(), shape, weight.float(), bias.float(), eps)

    return in_float32


@contextmanager
def as_on_cuda() -> Iterator[None]:
    """Keep the tensors that a GPU keeps, on the CPU.

    Dropout keeps a mask of bytes (on CPUs: the numbers that it multiplies by); autocast computes LayerNorm in float32
    (torch/amp: the list of CUDA); attention is fused for grouped queries, and without padding it has no mask.
    """
    AttentionInterface.register(FUSED, _fused)
    functional, vision = torch.nn.functional, modeling_qwen3_vl
    with (
        patch.object(functional, "dropout", _dropout),
        patch.object(functional, "layer_norm", _layer_norm(functional.layer_norm)),
        patch.object(modeling_qwen3, "create_causal_mask", lambda *_, **__: None),
        patch.object(vision, "create_causal_mask", lambda *_, **__: None),
        patch.object(vision, "is_flash_attention_requested", lambda config: True),
        patch.object(vision, "get_max_seqlen", lambda *_, **__: 0),
    ):
        yield


def make_fake(model: nn.Module) -> None:
    """Replace the weights of a model on the meta device by fake ones of the CPU; call it in a FakeTensorMode."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, weight in list(module._parameters.items()):
            if weight is not None:
                fake = nn.Parameter(torch.empty(weight.shape, dtype=weight.dtype), weight.requires_grad)
                module._parameters[name] = made.setdefault(id(weight), fake)
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
