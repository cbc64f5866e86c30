"""Measures a pass: how many bytes of tensors PyTorch holds at each moment of a forward and a backward pass.

The model is transformers' own, with peft's adapter, of two and of three layers; its tensors are fake: they have a shape
and no data. A pass does the same operations whatever its rows, so that the bytes at each of its moments are a
polynomial of the numbers of tokens: some passes give it exactly, and those of two and of three layers that of a layer.

torch.distributed._tools.mem_tracker measures the same, but refuses models with frozen weights (`register_hook`).
"""

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedConfig, Qwen3Config, Qwen3MoeConfig
from transformers.integrations import moe
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3_moe import modeling_qwen3_moe

from vlmflow.estimate.pass_memory import Moment, Pass, PassMemory
from vlmflow.estimate.way import BF16, FP32

FUSED = "fused_as_on_cuda"
"""The name of our attention among transformers'."""

TYPES = {BF16: torch.bfloat16, FP32: torch.float32}

SHORT, LONG, LONGER = 512, 1_024, 2_048
"""Tokens of the passes; any would do."""

FEW, MORE = 128, 256
"""Positions with logits."""

FEWEST = 2
"""Layers of the smaller model."""


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


class _Fused(torch.autograd.Function):
    """What a fused kernel keeps: its inputs, its result, a number for each row and head, and a mask if there is one."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *mask: torch.Tensor) -> Any:
        rows, heads, tokens, width = query.shape
        result = torch.empty(rows, tokens, heads, width, dtype=query.dtype).transpose(1, 2)
        ctx.save_for_backward(query, key, value, result, torch.empty(rows, heads, tokens), *mask)
        return result

    @staticmethod
    def backward(ctx: Any, *gradient: torch.Tensor) -> Any:
        query, key, value, _, _, *mask = ctx.saved_tensors
        return *map(torch.empty_like, (query, key, value)), *(None for _ in mask)


def _fused(module: Any, query: Any, key: Any, value: Any, attention_mask: Any = None, **options: Any) -> Any:
    """Attend as sdpa does: with a mask its kernel needs keys and values for every head, and the mask in their type."""
    if torch.is_autocast_enabled("cpu"):
        query, key, value = (each.to(torch.get_autocast_dtype("cpu")) for each in (query, key, value))
    masks = []
    if attention_mask is not None:
        key, value = (modeling_qwen3.repeat_kv(each, module.num_key_value_groups) for each in (key, value))
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
def as_on_cuda(mask: torch.dtype | None = None) -> Iterator[None]:
    """Keep the tensors that a GPU keeps, on the CPU. mask: the type of attention's mask, None for none.

    Dropout keeps a mask of bytes (on CPUs: the numbers that it multiplies by); autocast computes LayerNorm in float32
    (torch/amp: the list of CUDA); attention is fused for grouped queries, and without padding it has no mask.
    """

    def causal_mask(*_: Any, inputs_embeds: torch.Tensor, **__: Any) -> torch.Tensor | None:
        rows, tokens, _width = inputs_embeds.shape
        return None if mask is None else torch.ones(rows, 1, tokens, tokens, dtype=mask)

    functional = torch.nn.functional
    with (
        patch.object(functional, "dropout", _dropout),
        patch.object(functional, "layer_norm", _layer_norm(functional.layer_norm)),
        patch.object(modeling_qwen3, "create_causal_mask", causal_mask),
        patch.object(modeling_qwen3_moe, "create_causal_mask", causal_mask),
        patch.object(moe, "_grouped_mm", _grouped_mm),
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
        torch.empty(2, *hidden.shape, dtype=torch.float32)  # a piece of the logits, and its gradient
        return torch.empty(())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return ctx.saved_tensors


@dataclass
class _Course:
    """One pass, and the places of its parts among `live.moments`.

    kept: the bytes as the loss begins. begins: the place where each layer begins. loss: where the loss does. returns:
    where the gradient reaches each layer, the last one first.
    """

    live: LiveBytes
    kept: int = 0
    begins: list[int] = field(default_factory=list)
    loss: int = 0
    returns: list[int] = field(default_factory=list)

    def watch(self, model: Any) -> None:
        """Note the places of a model's layers. When a layer is computed again, it begins no more."""
        for layer in model.model.layers:
            layer.register_forward_pre_hook(self._begin)
            layer.register_forward_hook(self._end)
        model.model.norm.register_forward_pre_hook(self._begin_loss)

    @property
    def _place(self) -> int:
        return len(self.live.moments)

    def _begin(self, *_: Any) -> None:
        if not self.loss:
            self.begins.append(self._place)

    def _end(self, _layer: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
        if not self.loss:
            output.register_hook(self._return)

    def _return(self, _gradient: torch.Tensor) -> None:
        self.returns.append(self._place)

    def _begin_loss(self, *_: Any) -> None:
        self.loss, self.kept = self._place, self.live.live

    def without_second_layer(self) -> list[int]:
        """Return the moments as those of a model with a layer less."""
        (_, second, third, *_), (*_, back_to_second, back_to_first) = self.begins, self.returns
        moments = self.live.moments
        return moments[:second] + moments[third:back_to_second] + moments[back_to_first:]


def measure(one: Pass) -> PassMemory:
    """Return the bytes of a pass as a function of its rows. If some layers have experts, all count as such.

    Raises RuntimeError if passes of other rows do other operations.
    """
    lengths = (SHORT, LONG, LONGER) if one.padded or one.eager else (SHORT, LONG)
    sizes = [*((tokens, FEW) for tokens in lengths), (SHORT, MORE)]
    few = [_course(one, FEWEST, *size) for size in sizes]
    more = [_course(one, FEWEST + 1, tokens, FEW) for tokens in lengths]
    of_few = [[course.kept, *course.live.moments] for course in few]
    of_more = [[course.kept, *course.without_second_layer()] for course in more]
    if len({len(moments) for moments in (*of_few, *of_more)}) > 1:
        raise RuntimeError("passes of other rows do other operations")
    each = np.array(of_more) - np.array(of_few[: len(lengths)])
    each = np.concatenate([each, each[:1]])  # a layer has no logits
    of_all = np.array(of_few) + (one.text.num_hidden_layers - FEWEST) * each
    terms = np.array([(1, tokens, logits, tokens**2)[: len(sizes)] for tokens, logits in sizes])
    found = np.rint(np.linalg.solve(terms, of_all)).astype(int).T.tolist()
    kept, *moments = (Moment(*[*factors, 0][:4]) for factors in found)
    loss, end = few[0].loss, few[0].returns[0]
    return PassMemory(kept, _highest(moments[:loss] + moments[end:]), _highest(moments[loss:end]))


def _highest(moments: list[Moment]) -> list[Moment]:
    """Return the moments that may need the most, whatever the rows."""
    highest: list[Moment] = []
    for moment in moments:
        if not any(other.covers(moment) for other in highest):
            highest = [*(other for other in highest if not moment.covers(other)), moment]
    return highest


def _course(one: Pass, layers: int, tokens: int, logits: int) -> _Course:
    """Return the course of a pass of one row."""
    mask = TYPES[one.base] if one.eager else torch.bool if one.padded else None
    model = _model(one, layers)
    plain = model.get_base_model() if one.adapted else model
    if one.gradient_checkpointing:
        plain.gradient_checkpointing_enable({"use_reentrant": False})
    if not one.full:
        plain.enable_input_require_grads()
    with FakeTensorMode(), as_on_cuda(mask), _without_collector():
        make_fake(model)
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        for weight in trained:
            weight.grad = torch.zeros_like(weight)
        ids, labels, kept = (torch.zeros(1, count, dtype=torch.long) for count in (tokens, logits, logits))
        held = [*model.parameters(), *(weight.grad for weight in trained), *model.buffers(), ids, labels, kept]
        with LiveBytes(held) as live:
            course = _Course(live)
            course.watch(plain)
            with torch.autocast("cpu", torch.bfloat16, enabled=one.autocast):
                if one.liger:
                    hidden = plain.model(ids, use_cache=False).last_hidden_state
                    loss = _LigerLoss.apply(hidden[:, kept[0]], plain.lm_head.weight)
                    del hidden
                else:
                    loss = model(input_ids=ids, labels=labels, logits_to_keep=kept[0], use_cache=False).loss
            loss.backward()
    return course


def _model(one: Pass, layers: int) -> Any:
    """Return a model with so many layers, as it is trained; on the meta device, also an adapter of any size."""
    config = _config(one, layers)
    config._attn_implementation = "eager" if one.eager else FUSED
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=TYPES[one.base]).train()
    model.requires_grad_(one.full)
    if one.quantised:
        for module in model.model.modules():
            if isinstance(module, nn.Linear):
                module.__class__ = _QuantisedLinear
    if not one.adapted:
        return model
    adapter = one.adapter
    linear = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    adapted = [name for name in one.adapted if name in linear]  # those of dense layers are none beside experts
    lora = LoraConfig(r=adapter.rank, lora_dropout=adapter.dropout, target_modules=adapted, use_dora=adapter.dora)
    with torch.device("meta"):
        model = get_peft_model(model, lora)
    if not one.autocast:  # peft gives an adapter the type of its layer, but not on the meta device
        for weight in model.parameters():
            if weight.requires_grad:
                weight.data = weight.to(TYPES[one.base])
    return model


def _config(one: Pass, layers: int) -> PreTrainedConfig:
    text = one.text
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    sizes = {name: getattr(text, name) for name in (*names, "attention_bias")}
    sizes |= {"num_hidden_layers": layers, "head_dim": text.head_width, "tie_word_embeddings": one.tied}
    if not text.sparse_layers or not text.experts:
        return Qwen3Config(**sizes)
    experts = text.experts
    return Qwen3MoeConfig(
        **sizes,
        num_experts=experts.number,
        num_experts_per_tok=experts.per_token,
        moe_intermediate_size=experts.width,
    )


@contextmanager
def _without_collector() -> Iterator[None]:
    """Let tensors end where their last name does, and not whenever the garbage collector runs."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
