"""Measures a pass: how many bytes of tensors PyTorch holds at each moment of a forward and a backward pass.

The model is transformers' own, with peft's adapter, of a few of its layers; its tensors are fake: they have a shape and
no data, but for whole numbers, which say how much there is. A pass does the same operations whatever its rows, so that
the bytes at each of its moments are a polynomial of the numbers of tokens: some passes give it exactly, and those with
one layer more that of a layer. Layers of another kind (a window, experts) are told apart and added up.

torch.distributed._tools.mem_tracker measures the same, but refuses models with frozen weights (`register_hook`).
"""

import gc
import inspect
import re
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, PreTrainedModel
from transformers.integrations import moe
from transformers.integrations.sdpa_attention import repeat_kv

from vlmflow.estimate.meta_shape import kind_of, layers_of, numbered
from vlmflow.estimate.pass_memory import Moment, Pass, PassMemory
from vlmflow.estimate.shape import LANGUAGE
from vlmflow.estimate.states import BF16, FP32
from vlmflow.swift.meta_model import built

FUSED = "fused_as_on_cuda"
"""The name of our attention among transformers'."""

TYPES = {BF16: torch.bfloat16, FP32: torch.float32}

SHORT, LONG, LONGER = 512, 1_024, 2_048
"""Tokens of the passes; any would do."""

FEW, MORE = 128, 256
"""Positions with logits."""

FEWEST = 2
"""Layers of the smaller model, if all are of one kind."""

OF_PICTURES = ("token_type_ids", "mm_token_type_ids")
"""Inputs of a model that sees which say of each token whether it is one of a picture."""

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
            found = func(*args, **kwargs)
            made = isinstance(found, FakeTensor) and not found.is_floating_point() and found.numel() <= MOST_NUMBERS
            if tensors or not made:
                return found
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
        query, key, value = (each.to(torch.get_autocast_dtype("cpu")) for each in (query, key, value))
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
    made: list[int] = []

    def masked(
        batch_size: int,
        q_length: int,
        kv_length: int,
        *_: Any,
        local_size: int | None = None,
        allow_is_causal_skip: bool = True,
        allow_is_bidirectional_skip: bool = False,
        **__: Any,
    ) -> torch.Tensor | None:
        needed = not allow_is_causal_skip and not allow_is_bidirectional_skip
        if mask is None and not needed and not (windowed and local_size):
            return None
        made.append(kv_length)
        return torch.ones(batch_size, 1, q_length, kv_length, dtype=mask or torch.bool)

    functional = torch.nn.functional
    with (
        patch.object(functional, "dropout", _dropout),
        patch.object(functional, "layer_norm", _layer_norm(functional.layer_norm)),
        patch.dict(AttentionMaskInterface._global_mapping, {"eager": masked, FUSED: masked}),
        patch.object(moe, "_grouped_mm", _grouped_mm),
    ):
        yield made


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

    kept: the bytes as the loss begins. masked: whether attention has a mask, whose bytes grow by squares. with_extra:
    whether there is a layer more than in the smaller model, the second. layers, ended: how many the model has, and how
    many have run. begins: the place where each layer begins. loss: where the loss does. returns: where the gradient
    reaches each layer, the last one first.
    """

    live: LiveBytes
    kept: int = 0
    with_extra: bool = False
    masked: bool = False
    begins: list[int] = field(default_factory=list)
    layers: int = 0
    ended: int = 0
    loss: int = 0
    returns: list[int] = field(default_factory=list)
    _handles: list[Any] = field(default_factory=list)

    def watch(self, layers: Iterable[nn.Module]) -> None:
        """Note the places of a model's layers until `end`. When a layer is computed again, it begins no more."""
        self._handles.append(register_module_forward_pre_hook(self._begin_loss))
        for layer in layers:
            self.layers += 1
            self._handles += layer.register_forward_pre_hook(self._begin), layer.register_forward_hook(self._end)

    def end(self) -> None:
        """Note no more places."""
        for handle in self._handles:
            handle.remove()

    @property
    def _place(self) -> int:
        return len(self.live.moments)

    def _begin(self, *_: Any) -> None:
        if not self.loss:
            self.begins.append(self._place)

    def _end(self, _layer: nn.Module, _inputs: Any, output: Any) -> None:
        if not self.loss:
            self.ended += 1
            (output if isinstance(output, torch.Tensor) else output[0]).register_hook(self._return)

    def _return(self, _gradient: torch.Tensor) -> None:
        self.returns.append(self._place)

    def _begin_loss(self, *_: Any) -> None:
        """Note where the first module after the layers begins."""
        if self.ended == self.layers and not self.loss:
            self.loss, self.kept = self._place, self.live.live

    @property
    def moments(self) -> list[int]:
        """The moments; with a layer more than in the smaller model, those without the second layer."""
        moments = self.live.moments
        if not self.with_extra:
            return moments
        (_, second, third, *_), (*_, back_to_second, back_to_first) = self.begins, self.returns
        return moments[:second] + moments[third:back_to_second] + moments[back_to_first:]


def measure(one: Pass) -> PassMemory:
    """Return the bytes of a pass as a function of its rows.

    Raises ValueError if passes of other rows do other operations.
    """
    with FakeTensorMode(allow_non_fake_inputs=True), TemporaryDirectory() as folder:
        passed = _Passed(one, one.files.write(Path(folder)))
        first = passed.course(SHORT, FEW)
        sizes = [(SHORT, FEW), (LONG, FEW), *([(LONGER, FEW)] if first.masked else []), (SHORT, MORE)]
        few = [first, *(passed.course(*size) for size in sizes[1:])]
        of_all = _moments(few)
        found = of_all.copy()
        for extra, count in passed.extras:
            more = [passed.course(*size, extra) for size in sizes[:-1]]
            each = _moments(more) - of_all[:-1]
            found += count * np.concatenate([each, each[:1]])  # a layer has no logits
    terms = np.array([(1, tokens, logits, tokens**2)[: len(sizes)] for tokens, logits in sizes])
    factors = np.rint(np.linalg.solve(terms, found)).astype(int).T.tolist()
    kept, *moments = (Moment(*[*each, 0][:4]) for each in factors)
    loss, end = few[0].loss, few[0].returns[0]
    return PassMemory(kept, _highest(moments[:loss] + moments[end:]), _highest(moments[loss:end]))


def _moments(courses: list[_Course]) -> Any:
    """Return the bytes kept and at each moment of some courses, one row each.

    Raises ValueError if they have not as many moments.
    """
    return np.array([[course.kept, *course.moments] for course in courses])


def _highest(moments: list[Moment]) -> list[Moment]:
    """Return the moments that may need the most, whatever the rows."""
    highest: list[Moment] = []
    for moment in moments:
        if not any(other.covers(moment) for other in highest):
            highest = [*(other for other in highest if not moment.covers(other)), moment]
    return highest


class _Passed:
    """A model whose passes are measured, with the layers that they need.

    base: the layers of the smaller model: the first one, and the last one of each kind. extras: another layer of each
    kind, and how many more than in `base` the model has.
    """

    def __init__(self, one: Pass, folder: Path) -> None:
        self.one = one
        self.model = trained_model(one, folder, self._choose)
        if LANGUAGE not in one.trained:
            self.model.enable_input_require_grads()
        self.trained = [weight for weight in self.model.parameters() if weight.requires_grad]

    def _choose(self, model: PreTrainedModel) -> None:
        """Keep the layers that the passes need."""
        self.layers = layers_of(model)
        layers, kinds = list(self.layers), _kinds(model)
        last = {kind: number for number, kind in enumerate(kinds)}
        base = sorted({0, *last.values()})
        if len(base) < FEWEST <= len(layers):
            base = list(range(FEWEST))
        more = Counter(kinds) - Counter(kinds[number] for number in base)
        others = [number for number in range(len(layers)) if number not in base]
        extras = {kind: next(number for number in others if kinds[number] == kind) for kind in more}
        self.base = [layers[number] for number in base]
        self.extras = [(layers[number], more[kind]) for kind, number in extras.items()]
        _set(self.layers, [*self.base, *(layer for layer, _ in self.extras)])

    def course(self, tokens: int, logits: int, extra: nn.Module | None = None) -> _Course:
        """Return the course of a pass of one row over the layers of the smaller model; extra: one more, the second."""
        one, model = self.one, self.model
        layers = [self.base[0], *([extra] if extra else []), *self.base[1:]]
        _set(self.layers, layers)
        plain: Any = model.get_base_model() if one.adapted else model
        mask = TYPES[one.base] if one.eager else torch.bool if one.padded else None
        with as_on_cuda(mask, windowed=one.windowed) as masks, WithWholeNumbers(), _without_collector():
            for weight in self.trained:
                weight.grad = torch.zeros_like(weight)
            ids, labels, kept = (torch.zeros(1, count, dtype=torch.long) for count in (tokens, logits, logits))
            given = inspect.signature(plain.forward).parameters if hasattr(plain, "get_image_features") else ()
            kinds = {name: torch.zeros_like(ids) for name in OF_PICTURES if name in given}
            held = [*model.parameters(), *(weight.grad for weight in self.trained), *model.buffers()]
            with LiveBytes([*held, ids, labels, kept, *kinds.values()]) as live:
                course = _Course(live, with_extra=extra is not None)
                course.watch(layers)
                with torch.autocast("cpu", torch.bfloat16, enabled=one.autocast):
                    if one.liger:
                        hidden = plain.base_model(ids, use_cache=False, **kinds).last_hidden_state
                        loss = _LigerLoss.apply(hidden[:, kept[0]], plain.get_output_embeddings().weight)
                        del hidden
                    else:
                        options = {"logits_to_keep": kept[0], "use_cache": False}
                        loss = model(input_ids=ids, labels=labels, **options, **kinds).loss
                loss.backward()
                course.end()
            course.masked = bool(masks)
            for weight in self.trained:
                weight.grad = None
        return course


def _kinds(model: PreTrainedModel) -> list[Any]:
    """Return what tells the layers of a model's decoder apart: their weights, and the kind of their attention."""
    text = model.config.get_text_config(decoder=True)
    kinds = getattr(text, "layer_types", None) or [None] * len(layers_of(model))
    return [
        (kind, *((name, weight.shape) for name, weight in layer.named_parameters()))
        for kind, layer in zip(kinds, layers_of(model), strict=True)
    ]


def _set(layers: nn.ModuleList, chosen: Iterable[nn.Module]) -> None:
    """Let a list of layers hold others."""
    layers._modules = {str(number): layer for number, layer in enumerate(chosen)}


def trained_model(one: Pass, folder: Path, choose: Callable[[PreTrainedModel], None] | None = None) -> Any:
    """Return a model on fake tensors as it is trained, also with an adapter of any size; call it in a FakeTensorMode.

    folder: of the files. choose: changes the model before the adapter is made.
    """
    with unset_fake_temporarily():
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        attention = "eager" if one.eager else FUSED
        model: Any = built(config, dtype=TYPES[one.base], attn_implementation=attention)
        if model._can_set_experts_implementation():
            model.set_experts_implementation("grouped_mm")
        model.train()
        if choose:
            choose(model)
        kind = kind_of(model)
        for name, weight in model.named_parameters():
            weight.requires_grad_(kind.part_of(name) in one.trained)
        if one.quantised:
            head = model.get_output_embeddings()
            for name, module in model.named_modules():
                if isinstance(module, nn.Linear) and module is not head and kind.part_of(name) == LANGUAGE:
                    module.__class__ = _QuantisedLinear
        plain = model
        if one.adapted:
            model = _with_adapter(model, one)
        if one.gradient_checkpointing:
            plain.gradient_checkpointing_enable({"use_reentrant": False})
    make_fake(model)
    return model


def _with_adapter(model: Any, one: Pass) -> Any:
    adapter = one.adapter
    layers = (
        name for name, module in model.named_modules() if next(module.parameters(recurse=False), None) is not None
    )
    # As an expression: of names in a list, peft takes some for experts' matrices.
    adapted = "|".join(re.escape(name) for name in layers if numbered(name) in one.adapted)
    lora = LoraConfig(r=adapter.rank, lora_dropout=adapter.dropout, target_modules=adapted, use_dora=adapter.dora)
    with torch.device("meta"):
        model = get_peft_model(model, lora)
    if not one.autocast:  # peft gives an adapter the type of its layer, but not on the meta device
        for weight in model.parameters():
            if weight.requires_grad:
                weight.data = weight.to(TYPES[one.base])
    return model


@contextmanager
def _without_collector() -> Iterator[None]:
    """Let tensors end where their last name does, and not whenever the garbage collector runs."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
