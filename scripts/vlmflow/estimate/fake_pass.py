"""Measures a pass: how many bytes of tensors PyTorch holds at each moment of a forward and a backward pass.

The model is transformers' own, with peft's adapter, of a few of its layers, on tensors without data. A pass does the
same operations whatever its rows, so that the bytes at each of its moments are a polynomial of the numbers of tokens:
some passes give it exactly, and those with one layer more that of a layer. Layers of another kind (a window, experts)
are told apart and added up. The picture tower passes alone: its inputs are what the model's own image processor makes
of blank pictures.

torch.distributed._tools.mem_tracker measures the same, but refuses models with frozen weights (`register_hook`).
"""

import gc
import inspect
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np
import torch
from PIL import Image
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoImageProcessor, PreTrainedModel

from vlmflow.estimate.fake_tensors import TYPES, LiveBytes, WithWholeNumbers, as_on_cuda, liger_loss, trained_model
from vlmflow.estimate.memory import Line, Moment, Pass, PassMemory, PictureMemory
from vlmflow.estimate.meta_shape import layers_of
from vlmflow.estimate.shape import LANGUAGE

SHORT, LONG, LONGER = 512, 1_024, 2_048
"""Tokens of the passes; any would do."""

FEW, MORE = 128, 256
"""Positions with logits."""

FEWEST = 2
"""Layers of the smaller model, if all are of one kind."""

OF_PICTURES = ("token_type_ids", "mm_token_type_ids")
"""Inputs of a model that sees which say of each token whether it is one of a picture."""

SIDE = 448
"""Pixels of a picture's side; any would do."""

FEW_PICTURES, MORE_PICTURES = 4, 8


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


def measure(wanted: Pass) -> PassMemory:
    """Return the bytes of a pass as a function of its rows.

    Raises ValueError if passes of other rows do other operations.
    """
    # In a child that has one thread, which renews PyTorch's pool of threads. After a fork, the first call for the pool
    # replaces it (caffe2/utils/threadpool/pthreadpool-cpp.cc, `pthreadpool`). Another thread that calls meanwhile gets
    # null, and PyTorch aborts; each thread that autograd starts calls for it.
    torch.set_num_threads(1)
    with FakeTensorMode(allow_non_fake_inputs=True), TemporaryDirectory() as folder:
        passed = _Passed(wanted, wanted.files.write(Path(folder)))
        first = passed.course(SHORT, FEW)
        sizes = [(SHORT, FEW), (LONG, FEW), *([(LONGER, FEW)] if first.masked else []), (SHORT, MORE)]
        few = [first, *(passed.course(*size) for size in sizes[1:])]
        smaller = _moments(few)
        whole = smaller.copy()
        for extra, count in passed.extras:
            more = [passed.course(*size, extra) for size in sizes[:-1]]
            of_layer = _moments(more) - smaller[:-1]
            whole += count * np.concatenate([of_layer, of_layer[:1]])  # a layer has no logits
    terms = np.array([(1, tokens, logits, tokens**2)[: len(sizes)] for tokens, logits in sizes])
    factors = np.rint(np.linalg.solve(terms, whole)).astype(int).T.tolist()
    kept, *moments = (Moment(*[*moment, 0][:4]) for moment in factors)
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

    def __init__(self, wanted: Pass, folder: Path) -> None:
        self.wanted = wanted
        self.model = trained_model(wanted, folder, self._choose)
        if LANGUAGE not in wanted.trained:
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
        wanted, model = self.wanted, self.model
        layers = [self.base[0], *([extra] if extra else []), *self.base[1:]]
        _set(self.layers, layers)
        plain: Any = model.get_base_model() if wanted.adapted else model
        mask = TYPES[wanted.base] if wanted.eager else torch.bool if wanted.padded else None
        with as_on_cuda(mask, windowed=wanted.windowed) as masks, WithWholeNumbers(), _without_collector():
            for weight in self.trained:
                weight.grad = torch.zeros_like(weight)
            ids, labels, kept = (torch.zeros(1, count, dtype=torch.long) for count in (tokens, logits, logits))
            given = inspect.signature(plain.forward).parameters if hasattr(plain, "get_image_features") else ()
            kinds = {name: torch.zeros_like(ids) for name in OF_PICTURES if name in given}
            held = [*model.parameters(), *(each.grad for each in self.trained), *model.buffers()]
            with LiveBytes([*held, ids, labels, kept, *kinds.values()]) as live:
                course = _Course(live, with_extra=extra is not None)
                course.watch(layers)
                with torch.autocast("cpu", torch.bfloat16, enabled=wanted.autocast):
                    if wanted.liger:
                        hidden = plain.base_model(ids, use_cache=False, **kinds).last_hidden_state
                        loss = liger_loss(hidden[:, kept[0]], plain.get_output_embeddings().weight)
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


@contextmanager
def _without_collector() -> Iterator[None]:
    """Let tensors end where their last name does, and not whenever the garbage collector runs."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def measure_pictures(wanted: Pass) -> PictureMemory:
    """Return what pictures need as a function of their tokens.

    Raises whatever the image processor or the tower raises: LookupError if pictures have no tokens.
    """
    torch.set_num_threads(1)  # this process is a fork
    with FakeTensorMode(allow_non_fake_inputs=True):
        tower = Tower(wanted)
        few, more = tower.bytes(FEW_PICTURES), tower.bytes(MORE_PICTURES)
        if few[0] == more[0]:
            raise LookupError("more pictures have no more tokens")
        kept, passing = (_line((few[0], few[n]), (more[0], more[n])) for n in (1, 2))
    with FakeTensorMode(allow_non_fake_inputs=True):
        tower = Tower(msgspec.structs.replace(wanted, eager=True))
        small, large = tower.operations(SIDE), tower.operations(2 * SIDE)
    forward, training = (_parabola((small[0], small[n]), (large[0], large[n])) for n in (1, 2))
    return PictureMemory(kept, passing, forward, training)


def _line(few: tuple[int, int], more: tuple[int, int]) -> Line:
    token = (more[1] - few[1]) / (more[0] - few[0])
    return Line(few[1] - token * few[0], token)


def _parabola(small: tuple[int, int], large: tuple[int, int]) -> Line:
    """Return a number without a constant; without a square if all pictures have as many tokens."""
    of_small, of_large = small[1] / small[0], large[1] / large[0]
    square = (of_large - of_small) / (large[0] - small[0]) if large[0] != small[0] else 0.0
    return Line(0, of_small - square * small[0], square)


class Tower:
    """A model with a picture tower, and its inputs. Features are what the language model gets in place of tokens."""

    def __init__(self, wanted: Pass) -> None:
        """wanted: the pass; its model is built in the FakeTensorMode in which this is called."""
        self.wanted = wanted
        with TemporaryDirectory() as folder:
            files = wanted.files.write(Path(folder))
            with unset_fake_temporarily():
                self.processor: Any = AutoImageProcessor.from_pretrained(files, local_files_only=True)
            self.model = trained_model(wanted, files)
        if wanted.adapted:
            self.model.enable_input_require_grads()
        self.plain: Any = self.model.get_base_model() if wanted.adapted else self.model

    def bytes(self, pictures: int) -> tuple[int, int, int]:
        """Return the tokens of some pictures of the same size, and the bytes kept and at most."""
        inputs = self._inputs([(SIDE, SIDE)] * pictures)
        with as_on_cuda(), WithWholeNumbers():
            held = [*self.model.parameters(), *self.model.buffers()]
            for weight in self.model.parameters():
                if weight.requires_grad:
                    weight.grad = torch.zeros_like(weight)
                    held.append(weight.grad)
            with LiveBytes(held) as live:
                live.add(inputs["pixel_values"])
                output, features = self._features(inputs)
                kept = live.live
                self._backward(features)
                del output
            return self._tokens(features), kept, max(live.moments)

    def operations(self, width: int) -> tuple[int, int, int]:
        """Return the tokens of a picture of this width, and the operations forward, and forward and backward."""
        inputs = self._inputs([(width, SIDE)])
        with as_on_cuda(), WithWholeNumbers(), FlopCounterMode(display=False) as counter:
            _, features = self._features(inputs)
            forward = counter.get_total_flops()
            self._backward(features)
        return self._tokens(features), forward, counter.get_total_flops()

    def _inputs(self, sizes: list[tuple[int, int]]) -> dict[str, Any]:
        with unset_fake_temporarily():
            made = self.processor(images=[Image.new("RGB", size) for size in sizes], return_tensors="pt")
        taken = inspect.signature(self.plain.get_image_features).parameters
        inputs = {name: value for name, value in made.items() if name in taken}
        return inputs | {"pixel_values": torch.empty(made["pixel_values"].shape)}

    def _features(self, inputs: dict[str, Any]) -> tuple[Any, list[torch.Tensor]]:
        pixels = inputs["pixel_values"]
        given = inputs | {"pixel_values": pixels if self.wanted.autocast else pixels.to(TYPES[self.wanted.base])}
        with torch.autocast("cpu", torch.bfloat16, enabled=self.wanted.autocast):
            output = self.plain.get_image_features(**given)
        features: list[torch.Tensor] = tree_leaves(getattr(output, "pooler_output", output))
        return output, features

    def _backward(self, features: list[torch.Tensor]) -> None:
        if any(tensor.requires_grad for tensor in features):
            torch.autograd.backward(features, [torch.ones_like(tensor) for tensor in features])

    def _tokens(self, features: list[torch.Tensor]) -> int:
        width = int(self.plain.get_input_embeddings().weight.shape[1])
        return int(sum(tensor.numel() for tensor in features) // width)
