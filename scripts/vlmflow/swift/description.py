"""Describes a model by what transformers and ms-swift know of it: parts, tensors, inputs, experts, special tokens."""

import inspect
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

import msgspec

from vlmflow.config.model_types import model_types, model_types_for


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
        layouts[starred(each), starred(loading.place(each)), tuple(type(one).__name__ for one in operations)] += 1
    inputs = inspect.signature(model.forward).parameters
    return Description(
        architecture=name,
        parts=dict(parts),
        layouts=[Layout(stored, loaded, count, list(how)) for (stored, loaded, how), count in layouts.items()],
        inputs=[one for one, how in inputs.items() if how.kind is not how.VAR_KEYWORD],
        tied=dict(model.all_tied_weights_keys),
        experts=max(map(len, experts), default=0),
    )


def starred(name: str) -> str:
    """Return the name of a tensor or layer with * for each number, as all of one kind have it."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)
