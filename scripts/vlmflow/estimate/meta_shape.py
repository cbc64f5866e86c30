"""Takes the sizes of a model from the model itself, as transformers builds it without memory for weights."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from vlmflow.config.model_types import ModelType, model_types, model_types_for
from vlmflow.estimate.shape import CONFIG, Files, Matrix, Shape, Unknown
from vlmflow.swift.meta_model import meta_model
from vlmflow.swift.model_layers import starred

NOT_LISTED = ("lm_head", "score", "v_head", "classifier")
NO_LINEAR = ("glulinear", "gemma4clippablelinear")
"""Names, and classes in lower case, that ms-swift's all-linear leaves out (4.6, utils/transformers_utils.py,
`find_all_linears`)."""


def measure(files: Files) -> Shape | Unknown:
    """Return the sizes of a model."""
    named = str(msgspec.json.decode(files.content[CONFIG], type=dict[str, Any]).get("model_type"))
    if named not in CONFIG_MAPPING:
        return Unknown(f"transformers knows no model_type {named[:100]!r}")
    with TemporaryDirectory() as folder:
        model = meta_model(files.write(Path(folder)))
    if model is None:
        return Unknown(f"it is quantised, or transformers has no decoder of model_type {named!r}")
    kind, layers = kind_of(model), layers_of(model)
    within = next(f"{name}." for name, module in model.named_modules() if module is layers)
    weights, outside = dict.fromkeys(("language_model", *kind.parts), 0), 0
    for name, weight in model.named_parameters():
        weights[kind.part_of(name)] += weight.numel()
        outside += weight.numel() * (kind.part_of(name) == "language_model" and not name.startswith(within))
    text, head = model.config.get_text_config(decoder=True), model.get_output_embeddings()
    counted = Counter(_matrices(model, kind, within, text))
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    query, value = (getattr(text, name, None) or width for name in ("qk_head_dim", "v_head_dim"))
    return Shape(
        weights=weights,
        matrices=[msgspec.structs.replace(matrix, count=count) for matrix, count in counted.items()],
        outside=outside,
        layers=len(layers),
        width=text.hidden_size,
        head=head.weight.numel(),
        attention=len(layers) * text.num_attention_heads * (query + value) // 2,
        window=getattr(text, "sliding_window", None),
        sees=hasattr(model, "get_image_features"),
    )


def kind_of(model: PreTrainedModel) -> ModelType:
    """Return ms-swift's kind of a model, for its parts; one with a single part if it has none of this class."""
    kinds = [model_types()[name] for name in model_types_for([type(model).__name__])]
    return next((kind for kind in kinds if kind.parts), ModelType([]))


def layers_of(model: PreTrainedModel) -> nn.ModuleList:
    """Return the layers of a model's decoder; raises LookupError if it has no list of them."""
    for module in model.get_decoder().modules():
        if isinstance(module, nn.ModuleList) and len(module) and isinstance(module[0], GradientCheckpointingLayer):
            return module
    raise LookupError(f"{type(model).__name__} has no list of layers")


def _matrices(model: PreTrainedModel, kind: ModelType, within: str, text: Any) -> Iterator[Matrix]:
    """Return each matrix of a model, with a count of 1. within: the prefix of the decoder's layers."""
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        own, layer = dict(module.named_parameters(recurse=False)), type(module).__name__.lower()
        common: dict[str, Any] = {"part": kind.part_of(name), "count": 1, "in_layers": name.startswith(within)}
        if isinstance(module, nn.Linear | Conv1D | nn.Embedding | nn.Conv2d | nn.Conv3d):
            first, second = len(module.weight), module.weight.numel() // len(module.weight)
            outputs, inputs = (second, first) if isinstance(module, Conv1D | nn.Embedding) else (first, second)
            yield Matrix(
                name=starred(name),
                inputs=inputs,
                outputs=outputs,
                weights=sum(weight.numel() for weight in own.values()),
                linear=isinstance(module, nn.Linear | Conv1D) and module is not head,
                listed="linear" in layer and layer not in NO_LINEAR and not any(word in name for word in NOT_LISTED),
                **common,
            )
            continue
        for parameter, weight in own.items():
            if weight.ndim in (2, 3):
                *experts, first, second = weight.shape
                number = experts[0] if experts else 1
                yield Matrix(
                    name=starred(f"{name}.{parameter}"),
                    inputs=first,
                    outputs=second,
                    weights=weight.numel(),
                    parameter=True,
                    experts=number,
                    active=min(number, getattr(text, "num_experts_per_tok", None) or number),
                    **common,
                )
