"""Which tensors of the base a training changes, and how.

Names and arithmetic as in peft 0.20: utils/save_and_load.py for the names, tuners/lora/layer.py and dora.py for the
arithmetic. An adapter has the names that layers have in memory, the base those of its files.
"""

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from vlmflow.config.strategies import ADAPTER_CONFIG
from vlmflow.core.errors import VlmflowError
from vlmflow.fetch.model_weights import ModelWeights, TensorEntry
from vlmflow.in_trainer.messages import TRAINED
from vlmflow.merging.tensors import FLOAT_TYPES
from vlmflow.merging.trained import SAVE_AGAIN, TRAIN_OTHERWISE, Adapter, AdapterConfig, TrainedModel

PREFIX = "base_model.model."
"""peft's prefix of a layer's name in the base model."""

PART = re.compile(r"(.+)\.(lora_A\.weight|lora_B\.weight|lora_embedding_[AB]|lora_magnitude_vector)")
LINEAR = ("lora_A.weight", "lora_B.weight")
EMBEDDING = ("lora_embedding_A", "lora_embedding_B")
MAGNITUDE = "lora_magnitude_vector"

INPUT_EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "embed_in", "tok_embeddings")
OUTPUT_HEADS = ("lm_head", "embed_out", "output")
"""Last parts of the names of layers of token embeddings and of logits in transformers' models."""

WRONG_BASE = (
    "merge into the base model that the adapter was trained on; if it is this one, the merge does not know its "
    "architecture's names of layers: report it, with the model's config.json"
)
TRAIN_AN_ADAPTER = (
    "train an adapter instead (runs.NAME.tuner: lora): the merge takes over only weights that the base has under the "
    "same names"
)


class Piece(msgspec.Struct, frozen=True):
    """What a tensor of the files takes of an update of experts.

    experts: their number. expert: whose matrix it is a part of; None if it has the matrices of all. first, last: the
    rows of B that it takes. transposed: whether it is stored as in by out.
    """

    experts: int
    expert: int | None
    first: int
    last: int
    transposed: bool


class ExpertLayer(msgspec.Struct, frozen=True):
    """An adapted parameter of experts.

    parameter: its name in memory. inside, outside: the width of each matrix's input and output. pieces: by the names of
    the tensors in the base's files.
    """

    parameter: str
    experts: int
    inside: int
    outside: int
    pieces: dict[str, Piece]


@dataclass(frozen=True)
class Update:
    """The change of one tensor W of the base: W' = m ⊙ V / ‖V‖ with V = R + scale · left · right.

    replacement: the trained tensor R that replaces W as a whole; without it R = W.
    factors: the names of the two factors, as `merge.load_factors` takes them; without them V = R.
    magnitude: the name of m, one length per row of V (DoRA, arXiv:2402.09353); without it W' = V.
    transposed: whether W is stored as in by out; left · right is then (B · A)ᵀ.
    piece: what W takes of factors that several experts share; without it all.
    swaps: whether R has rows and columns of each of its matrices swapped.
    """

    replacement: str | None = None
    factors: tuple[str, str] | None = None
    scale: float = 1.0
    magnitude: str | None = None
    transposed: bool = False
    piece: Piece | None = None
    swaps: bool = False


def plan_updates(
    weights: ModelWeights, trained: Adapter | TrainedModel, experts: Mapping[str, ExpertLayer]
) -> dict[str, Update]:
    """Return the update of every tensor of the base that the training changes, by its name in the base's files.

    Every tensor of an adapter is in the result exactly once.

    Raises VlmflowError with the name of a trained tensor that has no place in the base, does not fit it, belongs to a
    tied pair, or is not explained by the adapter's configuration; or of one that only one of two models has.
    """
    tensors = weights.tensors()
    if isinstance(trained, TrainedModel):
        return _replacements(trained, tensors, weights.config)
    layers, replacements = _by_layer(trained)
    changed = {f"{layer}.weight" for layer in layers} | replacements.keys()
    names = {}
    if not changed <= tensors.keys():  # most models need not be built for this, and transformers takes seconds
        from vlmflow.swift.meta_model import loaded_as

        names = loaded_as(weights.folder, tensors)
    base = {names.get(name, name): entry for name, entry in tensors.items()}
    _refuse_tied(trained, [*layers, *(_layer_of(name) for name in replacements)], base, weights.config)
    updates = {name: Update(replacement=key) for name, key in replacements.items()}
    for layer, parts in layers.items():
        if layer in experts:
            updates |= _expert_updates(trained, layer, parts, experts[layer])
        else:
            name = f"{layer}.weight"
            updates[name] = _layer_update(trained, layer, parts, base.get(name), replacements.get(name))
    for name, update in updates.items():
        _require_fit(trained, name, update, base)
    _require_saved(trained, layers, updates, base)
    stored = {loaded: name for name, loaded in names.items()}
    return {stored.get(name, name): update for name, update in updates.items()}


def _by_layer(adapter: Adapter) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """Return an adapter's tensors: the parts of each layer's update by kind, and those that replace whole tensors.

    Layers and replaced tensors have their names in memory.
    """
    layers: dict[str, dict[str, str]] = {}
    replacements: dict[str, str] = {}
    for key, (_, entry) in adapter.tensors.items():
        name = key.removeprefix(PREFIX)
        if name == key:
            raise _fault(adapter, key, f"does not begin with {PREFIX}", SAVE_AGAIN)
        if entry.dtype not in FLOAT_TYPES:
            raise _fault(adapter, key, f"holds {entry.dtype}, not floating-point numbers", SAVE_AGAIN)
        if part := PART.fullmatch(name):
            layers.setdefault(part[1], {})[part[2]] = key
            continue
        if "lora_" in name:
            raise _fault(adapter, key, "is a kind of LoRA tensor that the merge does not support", TRAIN_OTHERWISE)
        name = name.replace(".base_layer.", ".")
        if name in replacements:
            raise _fault(adapter, key, f"and {replacements[name]} both replace {name}", SAVE_AGAIN)
        _require_explained(adapter, key, name)
        replacements[name] = key
    return layers, replacements


def _require_explained(adapter: Adapter, key: str, name: str) -> None:
    """Refuse a whole tensor that peft would not save: it saves modules_to_save, trained biases and embedding layers."""
    module = _layer_of(name)
    is_bias = name.endswith(".bias") and adapter.config.bias != "none"
    is_embedding = _last(module) in INPUT_EMBEDDINGS + OUTPUT_HEADS
    if not (_saves(adapter.config, module) or is_bias or is_embedding):
        raise _fault(adapter, key, f"is explained by neither modules_to_save nor bias in {ADAPTER_CONFIG}", SAVE_AGAIN)


def _saves(config: AdapterConfig, module: str) -> bool:
    """Return whether modules_to_save names a layer or one above it; as in peft, the end of the name must match."""
    parts = module.split(".")
    above = [".".join(parts[: count + 1]) for count in range(len(parts))]
    return any(name.endswith(saved) for name in above for saved in config.modules_to_save or ())


def _refuse_tied(
    adapter: Adapter, layers: list[str], base: Mapping[str, TensorEntry], described: Mapping[str, Any]
) -> None:
    """Refuse an update of one of two layers that share a tensor: the other would change as well.

    described: the base's config.json.
    """
    stored = {_last(_layer_of(name)) for name in base if name.endswith(".weight")}
    if not _says_tied(described) and stored.intersection(OUTPUT_HEADS):
        return
    for layer in layers:
        last = _last(layer)
        if last in INPUT_EMBEDDINGS + OUTPUT_HEADS:
            other = "the output head" if last in INPUT_EMBEDDINGS else "the token embeddings"
            raise VlmflowError(
                f"{adapter.path}: the adapter changes {layer}, which the base ties to {other}: "
                "they share one tensor (tie_word_embeddings), and a merge would change both",
                f"train without {last} (runs.NAME.train.lora.target_modules), or untie the base and train again",
            )


def _layer_update(
    adapter: Adapter, layer: str, parts: dict[str, str], weight: TensorEntry | None, replacement: str | None
) -> Update:
    """Join one layer's parts into its update; raises VlmflowError for a missing, extra or wrongly shaped part."""
    first = next(iter(parts.values()))
    config = adapter.config
    names = EMBEDDING if set(parts) & set(EMBEDDING) else LINEAR
    magnitude = parts.get(MAGNITUDE)
    if names == EMBEDDING and magnitude:
        raise _fault(adapter, magnitude, "is DoRA on an embedding, which the merge does not support", TRAIN_OTHERWISE)
    if missing := [name for name in names if name not in parts]:
        raise _fault(adapter, first, f"has no {layer}.{missing[0]} beside it", SAVE_AGAIN)
    if set(parts) - {*names, MAGNITUDE}:
        raise _fault(adapter, first, f"{layer} has parts of both an embedding and a linear layer", SAVE_AGAIN)
    if config.use_dora != (magnitude is not None):
        raise _fault(adapter, first, f"use_dora is {config.use_dora}, but {MAGNITUDE} contradicts it", SAVE_AGAIN)
    a, b = (_shape(adapter, parts[name]) for name in names)
    if len(a) > 2 or len(b) > 2:
        raise _fault(adapter, first, f"{layer} is a convolution, which the merge does not support", TRAIN_OTHERWISE)
    if weight is None:
        raise _fault(adapter, first, f"the base has no tensor {layer}.weight", WRONG_BASE)
    transposed = names == EMBEDDING or config.fan_in_fan_out
    rank = _rank(config, layer)
    rows, columns = weight.shape if len(weight.shape) == 2 else (-1, -1)
    inside, outside = (rows, columns) if transposed else (columns, rows)
    fits_magnitude = magnitude is None or _shape(adapter, magnitude) == (outside,)
    if a != (rank, inside) or b != (outside, rank) or not fits_magnitude:
        turned = " stored in by out" if transposed else ""
        fault = f"A {a} and B {b} of rank {rank} do not fit {weight.name} {weight.shape}{turned}"
        raise _fault(adapter, first, fault, WRONG_BASE)
    factors = (parts[names[0]], parts[names[1]])
    return Update(replacement, factors, _scale(config, layer), magnitude, transposed)


def _expert_updates(adapter: Adapter, layer: str, parts: dict[str, str], experts: ExpertLayer) -> dict[str, Update]:
    """Return the updates of a layer's experts by the tensors of the base; raises VlmflowError as `_layer_update`."""
    first = next(iter(parts.values()))
    if set(parts) != set(LINEAR):
        raise _fault(adapter, first, f"{layer} has not exactly the parts {' and '.join(LINEAR)}", SAVE_AGAIN)
    a, b = (_shape(adapter, parts[name]) for name in LINEAR)
    rank = _rank(adapter.config, experts.parameter)
    if a != (rank * experts.experts, experts.inside) or b != (experts.outside, rank * experts.experts):
        number, size = f"{experts.experts} experts of {experts.parameter}", f"{experts.outside} by {experts.inside}"
        fault = f"A {a} and B {b} of rank {rank} do not fit the {number}, {size} each"
        raise _fault(adapter, first, fault, WRONG_BASE)
    factors, scale = (parts[LINEAR[0]], parts[LINEAR[1]]), _scale(adapter.config, experts.parameter)
    return {
        name: Update(factors=factors, scale=scale, transposed=piece.transposed, piece=piece)
        for name, piece in experts.pieces.items()
    }


def _rank(config: AdapterConfig, layer: str) -> int:
    """Return the rank of a layer's factors, by the layer's name in memory; of experts, the parameter's."""
    return int(_matching(config.rank_pattern, layer, config.r))


def _scale(config: AdapterConfig, layer: str) -> float:
    """Return the factor of a layer's update: alpha / r, or alpha / √r with rsLoRA (arXiv:2312.03732)."""
    rank = _rank(config, layer)
    alpha = float(_matching(config.alpha_pattern, layer, config.lora_alpha))
    return alpha / (math.sqrt(rank) if config.use_rslora else rank)


def _matching(patterns: Mapping[str, float], layer: str, default: float) -> float:
    """Return the value of the first pattern that matches the end of the layer's name (peft: get_pattern_key)."""
    values = (value for pattern, value in patterns.items() if re.match(rf"(.*\.)?({pattern})$", layer))
    return next(values, default)


def _require_fit(adapter: Adapter, name: str, update: Update, base: Mapping[str, TensorEntry]) -> None:
    key = update.replacement or (update.factors or ("",))[0]
    if name not in base:
        raise _fault(adapter, key, f"the base has no tensor {name}", WRONG_BASE)
    dtype, expected = base[name].dtype, base[name].shape
    if dtype not in FLOAT_TYPES:
        fault = f"{name} is {dtype} in the base; the merge supports {', '.join(FLOAT_TYPES)}"
        raise _fault(adapter, key, fault, WRONG_BASE)
    if update.replacement and (shape := _shape(adapter, key)) != expected:
        raise _fault(adapter, key, f"has shape {shape}, {name} of the base has {expected}", WRONG_BASE)


def _require_saved(
    adapter: Adapter, layers: Collection[str], updates: Mapping[str, Update], base: Collection[str]
) -> None:
    """Refuse an adapter that lacks a tensor that was trained as a whole, according to its configuration."""
    config = adapter.config
    for name in base:
        module = _layer_of(name)
        trains_bias = config.bias == "all" or (config.bias == "lora_only" and module in layers)
        was_trained = (trains_bias and name.endswith(".bias")) or _saves(config, module)
        if was_trained and (name not in updates or not updates[name].replacement):
            raise VlmflowError(
                f"{adapter.path}: has no {name}, though it was trained: {ADAPTER_CONFIG} has "
                f"bias = {config.bias}, modules_to_save = {config.modules_to_save} "
                "(peft 0.20 saves no bias with lora_only)",
                "train again with bias none or all, and the layers in modules_to_save saved",
            )


def _shape(adapter: Adapter, key: str) -> tuple[int, ...]:
    return adapter.tensors[key][1].shape


def _fault(adapter: Adapter, key: str, fault: str, next_step: str) -> VlmflowError:
    return VlmflowError(f"{adapter.path}: {key}: {fault}", next_step)


def _replacements(
    model: TrainedModel, base: Mapping[str, TensorEntry], described: Mapping[str, Any]
) -> dict[str, Update]:
    """Return the update of every trained tensor of the base: the checkpoint's tensor replaces it.

    Matrices of experts that transformers transposes as it loads them, because their shape says so, it saves as in
    memory (`core_model_loading.Transpose`). described: the base's config.json.
    """

    def fault(name: str, text: str) -> VlmflowError:
        return VlmflowError(f"{model.path}: tensor {name} {text}", TRAIN_AN_ADAPTER)

    if not model.names:
        raise VlmflowError(f"{model.path / TRAINED}: names no trained tensor", TRAIN_AN_ADAPTER)
    updates = {}
    for name in model.names:
        if name not in base:
            raise fault(name, "was trained, but the base has no tensor of this name")
        if name not in model.tensors:
            raise fault(name, "was trained, but the checkpoint does not have it")
        (_, saved), expected = model.tensors[name], base[name]
        swaps = saved.shape != expected.shape and saved.matrices_transposed == expected.shape
        if saved.shape != expected.shape and not swaps:
            raise fault(name, f"has shape {saved.shape}, in the base {expected.shape}")
        for owner, entry in (("checkpoint", saved), ("base", expected)):
            if entry.dtype not in FLOAT_TYPES:
                raise fault(name, f"is {entry.dtype} in the {owner}; the merge supports {', '.join(FLOAT_TYPES)}")
        updates[name] = Update(replacement=name, swaps=swaps)
    for name in model.tensors:
        if name not in base:
            raise fault(name, "is in the checkpoint, but not in the base")
    heads, inputs = (
        [name for name in base if _last(_layer_of(name)) in layers] for layers in (OUTPUT_HEADS, INPUT_EMBEDDINGS)
    )
    tied = [*inputs, *heads] if _says_tied(described) and heads and inputs else []
    for name in base:
        if name not in model.tensors and name not in tied:
            raise fault(name, "is in the base, but not in the checkpoint")
    if not updates.keys().isdisjoint(tied):
        raise VlmflowError(
            f"{model.path}: the token embeddings were trained, which the base stores twice ({', '.join(tied)}), "
            "although it ties them (tie_word_embeddings)",
            "remove the second copy from the base's files, or untie it (config.json), and train again",
        )
    return updates


def _says_tied(described: Mapping[str, Any]) -> bool:
    """Return whether a model's config.json ties the token embeddings to the output head."""
    return any(part.get("tie_word_embeddings") for part in (described, described.get("text_config") or {}))


def _layer_of(tensor: str) -> str:
    return tensor.rpartition(".")[0]


def _last(layer: str) -> str:
    """Return the name of a layer in its block: q_proj."""
    return layer.rpartition(".")[2]
