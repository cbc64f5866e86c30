"""Measures what pictures need: a pass of the picture tower alone, on tensors without data.

Its inputs are what the model's own image processor makes of blank pictures.
"""

import inspect
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import torch
from PIL import Image
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoImageProcessor

from vlmflow.estimate.fake_pass import TYPES, LiveBytes, WithWholeNumbers, as_on_cuda, trained_model
from vlmflow.estimate.pass_memory import Line, Pass, PictureMemory

SIDE = 448
"""Pixels of a picture's side; any would do."""

FEW, MORE = 4, 8
"""Pictures of the passes."""


class Tower:
    """A model with a picture tower, and its inputs. Features are what the language model gets in place of tokens."""

    def __init__(self, one: Pass) -> None:
        """one: the pass; its model is built in the FakeTensorMode in which this is called."""
        self.one = one
        with TemporaryDirectory() as folder:
            files = one.files.write(Path(folder))
            with unset_fake_temporarily():
                self.processor: Any = AutoImageProcessor.from_pretrained(files, local_files_only=True)
            self.model = trained_model(one, files)
        if one.adapted:
            self.model.enable_input_require_grads()
        self.plain: Any = self.model.get_base_model() if one.adapted else self.model

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
                found, features = self._features(inputs)
                kept = live.live
                self._backward(features)
                del found
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
        inputs = {name: value for name, value in made.items() if name in self._taken}
        return inputs | {"pixel_values": torch.empty(made["pixel_values"].shape)}

    @property
    def _taken(self) -> set[str]:
        """Return the names of the inputs of the tower."""
        return set(inspect.signature(self.plain.get_image_features).parameters)

    def _features(self, inputs: dict[str, Any]) -> tuple[Any, list[torch.Tensor]]:
        pixels = inputs["pixel_values"]
        given = inputs | {"pixel_values": pixels if self.one.autocast else pixels.to(TYPES[self.one.base])}
        with torch.autocast("cpu", torch.bfloat16, enabled=self.one.autocast):
            found = self.plain.get_image_features(**given)
        features: list[torch.Tensor] = tree_leaves(getattr(found, "pooler_output", found))
        return found, features

    def _backward(self, features: list[torch.Tensor]) -> None:
        if any(each.requires_grad for each in features):
            torch.autograd.backward(features, [torch.ones_like(each) for each in features])

    def _tokens(self, features: list[torch.Tensor]) -> int:
        width = int(self.plain.get_input_embeddings().weight.shape[1])
        tokens: int = sum(each.numel() for each in features) // width
        return tokens


def measure(one: Pass) -> PictureMemory:
    """Return what pictures need as a function of their tokens.

    Raises whatever the image processor or the tower raises: LookupError if pictures have no tokens.
    """
    torch.set_num_threads(1)  # this process is a fork
    with FakeTensorMode(allow_non_fake_inputs=True):
        tower = Tower(one)
        few, more = tower.bytes(FEW), tower.bytes(MORE)
        if few[0] == more[0]:
            raise LookupError("more pictures have no more tokens")
        kept, passing = (_line((few[0], few[n]), (more[0], more[n])) for n in (1, 2))
    with FakeTensorMode(allow_non_fake_inputs=True):
        tower = Tower(msgspec.structs.replace(one, eager=True))
        small, large = tower.operations(SIDE), tower.operations(2 * SIDE)
    forward, training = (_parabola((small[0], small[n]), (large[0], large[n])) for n in (1, 2))
    return PictureMemory(kept, passing, forward, training)


def _line(few: tuple[int, int], more: tuple[int, int]) -> Line:
    token = (more[1] - few[1]) / (more[0] - few[0])
    return Line(few[1] - token * few[0], token)


def _parabola(small: tuple[int, int], large: tuple[int, int]) -> Line:
    """Return a number without a constant; without a square if all pictures have as many tokens."""
    each, of_large = small[1] / small[0], large[1] / large[0]
    square = (of_large - each) / (large[0] - small[0]) if large[0] != small[0] else 0.0
    return Line(0, each - square * small[0], square)
