"""Describes a model by its layers: in its files, as transformers and ms-swift know them, and as a training loads them.

The description has parts, tensors, inputs, experts and special tokens. Of a loaded model it says by kind of layer which
are trained, and in which form they are in memory.
"""

import inspect
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from vlmflow.config.model_types import model_types, model_types_for

OF_PEFT = re.compile(r"lora_.*|base_layer|modules_to_save|original_module")
"""Parts of a parameter's name that peft adds behind the name of the layer."""

OF_WRAPPERS = {"_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module"}

LEAST_SHARE = 0.005
"""The share of a model's parameters from which on people want to know that a kind of layer is not trained."""


class Layout(msgspec.Struct, frozen=True, omit_defaults=True):
    """Tensors whose names differ only in numbers, which are *.

    stored, loaded: their names in files, and in memory. tensors: how many are in the files. converted: how they are
    converted as they are loaded, by transformers' names of the operations.
    """

    stored: str
    loaded: str
    tensors: int
    converted: list[str] = []


class Description(msgspec.Struct, frozen=True, omit_defaults=True):
    """A model.

    architecture: its class. parts: numbers that each part holds, by ms-swift's names. layouts: of its tensors. tied:
    tensors that files do not hold, by those that they are. experts: of each layer; 0 without. inputs: of its `forward`.
    special: texts that its tokenizer reads as one token each. pictures: the class that prepares them; "" without.
    """

    architecture: str
    parts: dict[str, int]
    layouts: list[Layout]
    inputs: list[str]
    tied: dict[str, str] = {}
    experts: int = 0
    special: list[str] = []
    pictures: str = ""


def describe(model: Any, loading: Any, experts: Iterable[Any], stored: Iterable[str]) -> Description:
    """Return what a model on the meta device says of itself.

    loading: where its tensors are loaded (`meta_model.Loading`). experts: its weights with a matrix for each expert.
    stored: the names of the tensors in its files.
    """
    name = type(model).__name__
    kinds = [model_types()[kind] for kind in model_types_for([name])]
    parts: Counter[str] = Counter()
    for parameter, weight in model.named_parameters():
        parts[kinds[0].part_of(parameter) if kinds else "language_model"] += weight.numel()
    layouts: Counter[tuple[str, str, tuple[str, ...]]] = Counter()
    for each in stored:
        operations = loading.conversion(each)[0]
        layouts[starred(each), starred(loading.target(each)), tuple(type(step).__name__ for step in operations)] += 1
    inputs = inspect.signature(model.forward).parameters
    return Description(
        architecture=name,
        parts=dict(parts),
        layouts=[Layout(stored, loaded, count, list(how)) for (stored, loaded, how), count in layouts.items()],
        inputs=[argument for argument, how in inputs.items() if how.kind is not how.VAR_KEYWORD],
        tied=dict(model.all_tied_weights_keys),
        experts=max(map(len, experts), default=0),
    )


def starred(name: str) -> str:
    """Return the name of a tensor or layer with * for each number, as all of one kind have it."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


class Layers(msgspec.Struct, frozen=True):
    """The layers of one kind.

    name: that of a layer, with * for each number. kind: the class of the layer in the base model. count: how many.
    parameters: numbers that their weights hold. bytes: of these weights in memory, over all processes that share them.
    trained: numbers that are trained in them: of an adapter, or of the weights themselves.
    """

    name: str
    kind: str
    count: int
    parameters: int
    bytes: int
    trained: int


def layers_of(model: Any) -> list[Layers]:
    """Return the layers of a model of transformers, with an adapter of peft or without, in the model's own order."""
    names: defaultdict[str, set[str]] = defaultdict(set)
    kinds: dict[str, str] = {}
    parameters, bytes_in_memory, trained = Counter[str](), Counter[str](), Counter[str]()
    for name, parameter in model.named_parameters():
        layer, is_adapters = _layer_of(name)
        group, numbers = starred(layer), _numbers(parameter)
        names[group].add(layer)
        trained[group] += numbers * parameter.requires_grad
        if not is_adapters:
            kinds[group] = kinds.get(group) or _kind(model, name)
            parameters[group] += numbers
            bytes_in_memory[group] += getattr(parameter, "ds_numel", parameter.numel()) * parameter.element_size()
    return [
        Layers(group, kinds.get(group, ""), len(layers), parameters[group], bytes_in_memory[group], trained[group])
        for group, layers in names.items()
    ]


def what_is_trained(layers: Sequence[Layers]) -> str:
    """Return a line for people: how many numbers are trained, in which kinds of layers, and in which large ones not."""
    total, trained = sum(each.parameters for each in layers), sum(each.trained for each in layers)
    # The name of a layer in its block: q_proj.
    paths = (layer.name.split(".") for layer in layers if layer.trained)
    within = dict.fromkeys(next(part for part in reversed(path) if part != "*") for path in paths)
    without = [
        f"{layer.name} ({layer.parameters / total:.0%} of the model)"
        for layer in layers
        if not layer.trained and layer.parameters >= LEAST_SHARE * total
    ]
    places = ", ".join(within) or "no layer"
    line = f"{trained:,} numbers are trained, the model has {total:,}; in {places}"
    return f"{line}; not trained: {', '.join(without)}" if without else line


def share_without_adapter(layers: Sequence[Layers]) -> float:
    """Return the share of a model's numbers that are in layers of which nothing is trained."""
    total = sum(layer.parameters for layer in layers)
    return sum(layer.parameters for layer in layers if not layer.trained) / max(1, total)


def _layer_of(parameter: str) -> tuple[str, bool]:
    """Return the name in the base model of the layer to which a parameter belongs, and whether it is an adapter's."""
    parts = [part for part in parameter.removeprefix("base_model.model.").split(".") if part not in OF_WRAPPERS]
    for index, part in enumerate(parts):
        if OF_PEFT.fullmatch(part):
            return ".".join(parts[:index]), any(each.startswith("lora_") for each in parts[index:])
    return ".".join(parts[:-1]), False


def _numbers(parameter: Any) -> int:
    """Return how many numbers a parameter holds: also one that is quantised, or shared by DeepSpeed's processes."""
    if getattr(parameter, "quant_state", None) is not None:
        return int(parameter.quant_state.shape.numel())
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _kind(model: Any, parameter: str) -> str:
    """Return the class of the layer that holds a parameter."""
    return type(model.get_submodule(parameter.rpartition(".")[0])).__name__
