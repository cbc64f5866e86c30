"""Where an adapter's update of a layer's experts belongs in the base's files.

Since transformers 5 a parameter with three dimensions has one matrix per expert of a layer. peft adapts it as a whole
(`target_parameters`; tuners/lora/layer.py, `ParamWrapper`), with r rows of A and r columns of B per expert. The files
have one tensor with all matrices, or one or several per expert; transformers' rules of loading say which.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers.core_model_loading import Concatenate, MergeModulelist, Transpose, dot_natural_key

from vlmflow.core.errors import VlmflowError
from vlmflow.fetch.model_weights import ModelWeights
from vlmflow.merging.plan import ExpertLayer, Piece
from vlmflow.swift.child_process import limited
from vlmflow.swift.meta_model import Loading, meta_model


def expert_layers(weights: ModelWeights, targets: Collection[str]) -> dict[str, ExpertLayer]:
    """Return the parameters of experts that an adapter changes, by the name of their layer in the adapter.

    weights: of the base. targets: the adapter's `target_parameters`, each the whole name of a parameter or its end.

    Raises VlmflowError if the model cannot be built, or its files have experts in a form that the merge does not know.
    """
    base, shapes = weights.folder, {name: entry.shape for name, entry in weights.tensors().items()}
    layers = limited(partial(_expert_layers, base, shapes, targets))
    if "failed" in layers:
        raise VlmflowError(
            f"{base}: the places of its experts in its files are not known: {layers['failed']}",
            "train without runs.NAME.train.lora.experts, or report this with the model's config.json",
        )
    return msgspec.convert(layers, dict[str, ExpertLayer])


def _expert_layers(base: Path, shapes: Mapping[str, Sequence[int]], targets: Collection[str]) -> dict[str, Any]:
    model = meta_model(base)
    if model is None:
        raise ValueError("transformers does not know the class of its config.json, or it is quantised")
    loading = Loading(model, model.state_dict())
    sources: defaultdict[str, list[str]] = defaultdict(list)
    for name in shapes:
        sources[loading.target(name)].append(name)
    layers = {}
    for path, module in model.named_modules():
        parameters = [name for name, _ in module.named_parameters(recurse=False)]
        # As peft takes a parameter for one of `targets` (tuners_utils.py, `_inject_parameters`).
        wanted = tuple(f".{target}" for target in targets)
        adapted = [name for name in parameters if f".{path}.{name}".endswith(wanted)]
        # peft wraps the module once per parameter, in their order: the last one's factors are outermost.
        for wrappers, name in enumerate(reversed(adapted)):
            parameter, weight = f"{path}.{name}", module.get_parameter(name)
            if weight.ndim == 3:
                turned = bool(getattr(module, "is_transposed", False))
                layer = _layer(loading, parameter, weight, turned, {name: shapes[name] for name in sources[parameter]})
                layers[".".join([path, *["base_layer"] * wrappers])] = msgspec.to_builtins(layer)
    return layers


def _layer(
    loading: Loading, parameter: str, weight: torch.Tensor, turned: bool, shapes: Mapping[str, Sequence[int]]
) -> ExpertLayer:
    """Return an adapted parameter with its pieces. turned: whether its matrices are in by out. shapes: of its tensors.

    Raises ValueError for an unknown form.
    """
    experts, rows, columns = weight.shape
    inside, outside = (rows, columns) if turned else (columns, rows)
    first = next(iter(shapes), "")
    operations, patterns, _ = loading.conversion(first)
    steps = [type(operation) for operation in operations]
    if len(shapes) == 1 and len(shapes[first]) == 3 and steps in ([], [Transpose]):
        swapped = _is_swapped(operations, shapes[first], weight.shape)
        pieces = {first: Piece(experts, None, 0, outside, turned != swapped)}
    elif not turned and _stacks(operations):
        pieces = {}
        height = outside // len(patterns)
        for number, pattern in enumerate(patterns):
            names = [name for name in shapes if loading.conversion(name)[2] == pattern]
            for expert, name in enumerate(sorted(names, key=dot_natural_key)):
                pieces[name] = Piece(experts, expert, number * height, (number + 1) * height, False)
        fitting = all(tuple(shape) == (height, inside) for shape in shapes.values())
        if len(pieces) != experts * len(patterns) or height * len(patterns) != outside or not fitting:
            raise ValueError(f"{parameter} of {experts} experts has {len(shapes)} tensors of another number or shape")
    else:
        how = ", ".join(step.__name__ for step in steps) or "nothing"
        raise ValueError(f"{parameter} is made of {len(shapes)} tensors by {how}")
    return ExpertLayer(parameter, experts, inside, outside, pieces)


def _is_swapped(operations: Sequence[Any], stored: Sequence[int], wanted: Sequence[int]) -> bool:
    """Return whether the files have each matrix transposed; most rules of transformers ask the shapes."""
    swapped = [not step.check_dims or tuple(stored) != tuple(wanted) for step in operations]
    is_swapped = bool(swapped and swapped[0])
    experts, rows, columns = wanted
    if tuple(stored) != ((experts, columns, rows) if is_swapped else tuple(wanted)):
        raise ValueError(f"a tensor of shape {tuple(stored)} does not become one of {tuple(wanted)}")
    return is_swapped


def _stacks(operations: Sequence[Any]) -> bool:
    """Return whether operations stack a matrix per expert, after those of the same rows are put below each other."""
    steps = [(type(step), step.dim) for step in operations if hasattr(step, "dim")]
    stack = (MergeModulelist, 0)
    return len(steps) == len(operations) and steps in ([stack], [stack, (Concatenate, 1)])
