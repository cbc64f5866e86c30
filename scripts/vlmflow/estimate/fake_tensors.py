"""Models and tensors without data, which take memory as those of a GPU do.

A tensor is fake: it has a shape and no data, but for whole numbers, which say how much there is.
"""

import re
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, PreTrainedModel
from transformers.integrations import moe
from transformers.integrations.sdpa_attention import repeat_kv

from vlmflow.estimate.memory import Pass
from vlmflow.estimate.meta_shape import kind_of
from vlmflow.estimate.run import BF16, FP32
from vlmflow.estimate.shape import LANGUAGE
from vlmflow.swift.meta_model import built
from vlmflow.swift.model_layers import starred

FUSED = "fused_as_on_cuda"
"""The name of our attention among transformers'."""

TYPES = {BF16: torch.bfloat16, FP32: torch.float32}

MOST_NUMBERS = 1 << 26
"""Whole numbers that a tensor with data may have."""


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that exist, from the first operation that returns them to their end.

    live: now. moments: the bytes whenever there was one more storage.
    """

    def __init__(self, held: Iterable[torch.Tensor]) -> None:
        """held: what exists already; it does not count."""
        super().__init__()
        self._known: dict[int, int] = {}
        self.live = 0
        self.moments: list[int] = []
        for tensor in held:
            self.add(tensor)
        self.live = 0
        self.moments.clear()

    def add(self, tensor: torch.Tensor) -> None:
        """Count the storage of a tensor from now on."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._known:
            self._known[key] = storage.nbytes()
            weakref.finalize(storage, self._remove, key)
            self.live += storage.nbytes()
            self.moments.append(self.live)

    def _remove(self, key: int) -> None:
        self.live -= self._known.pop(key)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.add(leaf)
        return result


class WithWholeNumbers(TorchDispatchMode):
    """Gives tensors of whole numbers their data in a FakeTensorMode: sizes of pictures, positions, masks."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if not tensors or not all(map(_has_whole_numbers, tensors)):
            result = func(*args, **kwargs)
            is_new = isinstance(result, FakeTensor) and not result.is_floating_point()
            if tensors or not is_new or result.numel() > MOST_NUMBERS:
                return result
        with unset_fake_temporarily():
            return func(*args, **kwargs)


def _has_whole_numbers(tensor: torch.Tensor) -> bool:
    return not isinstance(tensor, FakeTensor) and not tensor.is_floating_point() and tensor.device.type == "cpu"


class _Fused(torch.autograd.Function):
    """What a fused kernel keeps: its inputs, its result, a number for each row and head, and a mask if there is one."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *mask: torch.Tensor) -> Any:
        rows, heads, tokens, _ = query.shape
        result = torch.empty(rows, tokens, heads, value.shape[-1], dtype=query.dtype).transpose(1, 2)
        ctx.save_for_backward(query, key, value, result, torch.empty(rows, heads, tokens), *mask)
        return result

    @staticmethod
    def backward(ctx: Any, *gradient: torch.Tensor) -> Any:
        query, key, value, _, _, *mask = ctx.saved_tensors
        return *map(torch.empty_like, (query, key, value)), *(None for _ in mask)


def _fused(module: Any, query: Any, key: Any, value: Any, attention_mask: Any = None, **options: Any) -> Any:
    """Attend as sdpa does: with a mask its kernel needs keys and values for every head, and the mask in their type."""
    if torch.is_autocast_enabled("cpu"):
        query, key, value = (tensor.to(torch.get_autocast_dtype("cpu")) for tensor in (query, key, value))
    masks = []
    if attention_mask is not None:
        key, value = (repeat_kv(each, query.shape[1] // each.shape[1]) for each in (key, value))
        masks = [attention_mask.to(query.dtype)]
    return _Fused.apply(query, key, value, *masks).transpose(1, 2).contiguous(), None


AttentionInterface.register(FUSED, _fused)


def _dropout(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    return torch.native_dropout(x, p, True)[0] if training and p else x


def _layer_norm(plain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def in_float32(x: torch.Tensor, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Any:
        if not torch.is_autocast_enabled("cpu"):
            return plain(x, shape, weight, bias, eps)
        return plain(x.float(), shape, weight.float(), bias.float(), eps)

    return in_float32


@contextmanager
def as_on_cuda(mask: torch.dtype | None = None, *, windowed: bool = False) -> Iterator[list[int]]:
    """Keep the tensors that a GPU keeps, on the CPU; gives a list, to which each mask of attention adds its length.

    mask: the type of attention's mask, None for none. windowed: whether a layer with a window needs one in any case.

    Dropout keeps a mask of bytes (on CPUs: the numbers that it multiplies by); autocast computes LayerNorm in float32
    (torch/amp: the list of CUDA); attention is fused for grouped queries. It has a mask for padding, for a window that
    is shorter than the row, and where a model asks for one in any case.
    """
    lengths: list[int] = []

    def masked(
        batch_size: int, q_length: int, kv_length: int, *_: Any, local_size: int | None = None, **options: Any
    ) -> torch.Tensor | None:
        may_skip = options.get("allow_is_causal_skip", True) or options.get("allow_is_bidirectional_skip", False)
        if mask is None and may_skip and not (windowed and local_size):
            return None
        lengths.append(kv_length)
        return torch.ones(batch_size, 1, q_length, kv_length, dtype=mask or torch.bool)

    functional = torch.nn.functional
    with (
        patch.object(functional, "dropout", _dropout),
        patch.object(functional, "layer_norm", _layer_norm(functional.layer_norm)),
        patch.dict(AttentionMaskInterface._global_mapping, {"eager": masked, FUSED: masked}),
        patch.object(moe, "_grouped_mm", _grouped_mm),
    ):
        yield lengths


class _FourBits(torch.autograd.Function):
    """A product with a matrix that is restored from 4 bits for it, forward and backward (bitsandbytes, MatMul4Bit)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return x @ torch.empty_like(weight, dtype=x.dtype).t()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (weight,), (gradient,) = ctx.saved_tensors, gradients
        return gradient @ torch.empty_like(weight, dtype=gradient.dtype), None


class _QuantisedLinear(nn.Linear):
    """A linear layer in 4 bits. Its weight counts in no case, so that it may have another type here."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _FourBits.apply(x, self.weight)


class _Grouped(torch.autograd.Function):
    """The product of each token with the matrix of its expert; on fake tensors PyTorch's own is for bfloat16 alone."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight, x if weight.requires_grad else None)
        return x.new_empty(len(x), weight.shape[-1])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (weight, x), (gradient,) = ctx.saved_tensors, gradients
        return gradient.new_empty(len(gradient), weight.shape[1]), None if x is None else torch.empty_like(weight)


def _grouped_mm(x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    return _Grouped.apply(x.to(weight.dtype), weight)


class _LigerLoss(torch.autograd.Function):
    """Liger's loss: it computes logits in pieces of about as many numbers as hidden states, and at once gradients."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(torch.empty_like(hidden), torch.empty_like(head) if head.requires_grad else None)
        torch.empty(2, *hidden.shape, dtype=torch.float32)  # a piece of logits, and its gradient
        return torch.empty(())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return ctx.saved_tensors


def liger_loss(hidden: torch.Tensor, head: torch.Tensor) -> Any:
    """Return Liger's loss. hidden: states of the positions with logits. head: the output head's weights."""
    return _LigerLoss.apply(hidden, head)


def trained_model(wanted: Pass, folder: Path, choose: Callable[[PreTrainedModel], None] | None = None) -> Any:
    """Return a model on fake tensors as it is trained, also with an adapter of any size; call it in a FakeTensorMode.

    folder: of the files. choose: changes the model before the adapter is made.
    """
    with unset_fake_temporarily():
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        attention = "eager" if wanted.eager else FUSED
        model: Any = built(config, dtype=TYPES[wanted.base], attn_implementation=attention)
        if model._can_set_experts_implementation():
            model.set_experts_implementation("grouped_mm")
        model.train()
        if choose:
            choose(model)
        kind = kind_of(model)
        for name, weight in model.named_parameters():
            weight.requires_grad_(kind.part_of(name) in wanted.trained)
        if wanted.quantised:
            head = model.get_output_embeddings()
            for name, module in model.named_modules():
                if isinstance(module, nn.Linear) and module is not head and kind.part_of(name) == LANGUAGE:
                    module.__class__ = _QuantisedLinear
        plain = model
        if wanted.adapted:
            model = _with_adapter(model, wanted)
        if wanted.gradient_checkpointing:
            plain.gradient_checkpointing_enable({"use_reentrant": False})
    make_fake(model)
    return model


def _with_adapter(model: Any, wanted: Pass) -> Any:
    layers = (
        name for name, module in model.named_modules() if next(module.parameters(recurse=False), None) is not None
    )
    # As an expression: of names in a list, peft takes some for experts' matrices.
    adapted = "|".join(re.escape(name) for name in layers if starred(name) in wanted.adapted)
    lora = LoraConfig(r=wanted.rank, lora_dropout=wanted.dropout, target_modules=adapted, use_dora=wanted.dora)
    with torch.device("meta"):
        model = get_peft_model(model, lora)
    if not wanted.autocast:  # peft gives an adapter its layer's type, but not on the meta device
        for weight in model.parameters():
            if weight.requires_grad:
                weight.data = weight.to(TYPES[wanted.base])
    return model


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
