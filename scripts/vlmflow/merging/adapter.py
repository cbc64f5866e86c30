"""An adapter's tensors, and how each of them changes a tensor of the base model.

Names and arithmetic as in peft 0.20: utils/save_and_load.py for the names, tuners/lora/layer.py and dora.py
for the arithmetic.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from vlmflow.config.strategies import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from vlmflow.core.errors import VlmflowError
from vlmflow.fetch.model_weights import SafetensorsFile, TensorEntry, read_header
from vlmflow.merging.adapter_config import TRAIN_OTHERWISE, AdapterConfig, read_adapter_config
from vlmflow.merging.tensors import FLOAT_TYPES, read_tensor

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
SAVE_AGAIN = "save the adapter again with peft's save_pretrained, or train it again"


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
    """The adapter's change of one tensor W of the base: W' = m ⊙ V / ‖V‖ with V = R + scale · left · right.

    replacement: the adapter's tensor R that replaces W as a whole; without it R = W.
    factors: the names of the two factors, as `load_factors` takes them; without them V = R.
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


@dataclass(frozen=True)
class Adapter:
    """An adapter on disk: its configuration and the header of its weights."""

    config: AdapterConfig
    weights: SafetensorsFile

    def place(self, key: str) -> tuple[Path, TensorEntry]:
        """Return the file of a tensor, and its place there."""
        return self.weights.path, self.weights.tensors[key]

    def changes(self) -> set[str]:
        """Return the names in memory of the tensors of the base that the adapter changes."""
        names = [key.removeprefix(PREFIX).replace(".base_layer.", ".") for key in self.weights.tensors]
        return {f"{part[1]}.weight" if (part := PART.fullmatch(name)) else name for name in names}


def read_adapter(folder: Path) -> Adapter:
    """Read the adapter in `folder` without its weights.

    Raises VlmflowError if a file is missing or damaged, or the adapter is of a kind that cannot be merged.
    """
    path = folder / ADAPTER_WEIGHTS
    if not path.exists():
        raise VlmflowError(f"{path}: is missing", SAVE_AGAIN)
    config = read_adapter_config(folder)
    weights = read_header(path)
    for entry in weights.tensors.values():
        if entry.dtype not in FLOAT_TYPES:
            raise VlmflowError(
                f"{path}: tensor {entry.name} holds {entry.dtype}, not floating-point numbers", SAVE_AGAIN
            )
    if not weights.tensors:
        raise VlmflowError(f"{path}: has no tensors", SAVE_AGAIN)
    return Adapter(config, weights)


def of_each_matrix(entry: TensorEntry, update: Update) -> Iterator[tuple[TensorEntry, Update]]:
    """Yield a tensor with its update; of one that has the matrices of all experts, each matrix with its own."""
    if not (piece := update.piece) or piece.expert is not None:
        yield entry, update
        return
    size = (entry.end - entry.begin) // piece.experts
    for expert in range(piece.experts):
        begin = entry.begin + expert * size
        matrix = TensorEntry(entry.name, entry.dtype, entry.shape[1:], begin, begin + size)
        yield matrix, replace(update, piece=msgspec.structs.replace(piece, expert=expert))


def load_factors(load: Callable[[str], torch.Tensor], update: Update) -> tuple[torch.Tensor, torch.Tensor]:
    """Return left (rows by r) and right (r by columns), contiguous and in float32, for W (rows by columns).

    load: returns a tensor of the adapter, as `load_finite` does. The update is that of one matrix (`of_each_matrix`).
    """
    a, b = (load(name) for name in update.factors or ())
    if (piece := update.piece) and piece.expert is not None:
        rank = len(a) // piece.experts
        a = a[piece.expert * rank :][:rank]
        b = b[piece.first : piece.last, piece.expert :: piece.experts]
    left, right = (a.T, b.T) if update.transposed else (b, a)
    return left.contiguous(), right.contiguous()


def load_finite(adapter: Adapter, name: str) -> torch.Tensor:
    """Load one tensor of the adapter in float32.

    Raises VlmflowError with the tensor's name if a number is not finite.
    """
    tensor = read_tensor(adapter.weights, name).float()
    if not torch.isfinite(tensor).all():
        raise VlmflowError(f"{adapter.weights.path}: tensor {name} holds NaN or infinity", "train the adapter again")
    return tensor


def plan_updates(
    adapter: Adapter,
    base: Mapping[str, TensorEntry],
    config: Mapping[str, Any],
    experts: Mapping[str, ExpertLayer],
) -> dict[str, Update]:
    """Return the update of every tensor of the base that the adapter touches, by its name.

    base: the base's tensors by name. config: the base's config.json. experts: the adapted parameters of experts, by the
    name of their layer in the adapter.

    Every tensor of the adapter is in the result exactly once.

    Raises VlmflowError with the name of a tensor of the adapter that has no place in the base, does not fit it, belongs
    to a tied pair, or is not explained by the adapter's configuration.
    """
    layers: dict[str, dict[str, str]] = {}
    replacements: dict[str, str] = {}
    for key in adapter.weights.tensors:
        name = key.removeprefix(PREFIX)
        if name == key:
            raise _fault(adapter, key, f"does not begin with {PREFIX}", SAVE_AGAIN)
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
    _refuse_tied(adapter, [*layers, *(name.rpartition(".")[0] for name in replacements)], base, config)
    updates = {name: Update(replacement=key) for name, key in replacements.items()}
    for layer, parts in layers.items():
        if layer in experts:
            updates |= _expert_updates(adapter, layer, parts, experts[layer])
            continue
        name = f"{layer}.weight"
        updates[name] = _layer_update(adapter, layer, parts, base.get(name), replacements.get(name))
    for name, update in updates.items():
        _require_fit(adapter, name, update, base)
    _require_saved(adapter, layers, updates, base)
    return updates


def _require_explained(adapter: Adapter, key: str, name: str) -> None:
    """Refuse a whole tensor that peft would not save: it saves modules_to_save, trained biases and embedding layers."""
    module, _, kind = name.rpartition(".")
    is_bias = kind == "bias" and adapter.config.bias != "none"
    is_embedding = module.rpartition(".")[2] in INPUT_EMBEDDINGS + OUTPUT_HEADS
    if not (adapter.config.saves(module) or is_bias or is_embedding):
        raise _fault(adapter, key, f"is explained by neither modules_to_save nor bias in {ADAPTER_CONFIG}", SAVE_AGAIN)


def _refuse_tied(
    adapter: Adapter, layers: list[str], base: Mapping[str, TensorEntry], config: Mapping[str, Any]
) -> None:
    """Refuse an update of one of two layers that share a tensor: the other would change as well."""
    stored = {name.removesuffix(".weight").rpartition(".")[2] for name in base if name.endswith(".weight")}
    says_tied = any(part.get("tie_word_embeddings") for part in (config, config.get("text_config") or {}))
    if not says_tied and stored.intersection(OUTPUT_HEADS):
        return
    for layer in layers:
        last = layer.rpartition(".")[2]
        if last in INPUT_EMBEDDINGS + OUTPUT_HEADS:
            other = "the output head" if last in INPUT_EMBEDDINGS else "the token embeddings"
            raise VlmflowError(
                f"{adapter.weights.path}: the adapter changes {layer}, which the base ties to {other}: "
                "they share one tensor (tie_word_embeddings), and a merge would change both",
                f"train without {last} (runs.NAME.train.lora.target_modules), or untie the base and train again",
            )


def _layer_update(
    adapter: Adapter, layer: str, parts: dict[str, str], weight: TensorEntry | None, replacement: str | None
) -> Update:
    """Join one layer's parts into its update; raises VlmflowError for a missing, extra or wrongly shaped part."""
    first = next(iter(parts.values()))
    names = EMBEDDING if set(parts) & set(EMBEDDING) else LINEAR
    magnitude = parts.get(MAGNITUDE)
    if names == EMBEDDING and magnitude:
        raise _fault(adapter, magnitude, "is DoRA on an embedding, which the merge does not support", TRAIN_OTHERWISE)
    if missing := [name for name in names if name not in parts]:
        raise _fault(adapter, first, f"has no {layer}.{missing[0]} beside it", SAVE_AGAIN)
    if set(parts) - {*names, MAGNITUDE}:
        raise _fault(adapter, first, f"{layer} has parts of both an embedding and a linear layer", SAVE_AGAIN)
    if adapter.config.use_dora != (magnitude is not None):
        raise _fault(
            adapter, first, f"use_dora is {adapter.config.use_dora}, but {MAGNITUDE} contradicts it", SAVE_AGAIN
        )
    a, b = (adapter.weights.tensors[parts[name]].shape for name in names)
    if len(a) > 2 or len(b) > 2:
        raise _fault(adapter, first, f"{layer} is a convolution, which the merge does not support", TRAIN_OTHERWISE)
    if weight is None:
        raise _fault(adapter, first, f"the base has no tensor {layer}.weight", WRONG_BASE)
    transposed = names == EMBEDDING or adapter.config.fan_in_fan_out
    rank = adapter.config.rank(layer)
    rows, columns = weight.shape if len(weight.shape) == 2 else (-1, -1)
    inside, outside = (rows, columns) if transposed else (columns, rows)
    fits_magnitude = magnitude is None or adapter.weights.tensors[magnitude].shape == (outside,)
    if a != (rank, inside) or b != (outside, rank) or not fits_magnitude:
        raise _fault(
            adapter,
            first,
            f"A {a} and B {b} of rank {rank} do not fit {weight.name} {weight.shape}"
            + (" stored in by out" if transposed else ""),
            WRONG_BASE,
        )
    factors = (parts[names[0]], parts[names[1]])
    return Update(replacement, factors, adapter.config.scale(layer), magnitude, transposed)


def _expert_updates(adapter: Adapter, layer: str, parts: dict[str, str], experts: ExpertLayer) -> dict[str, Update]:
    """Return the updates of a layer's experts by the tensors of the base; raises VlmflowError as `_layer_update`."""
    first = next(iter(parts.values()))
    if set(parts) != set(LINEAR):
        raise _fault(adapter, first, f"{layer} has not exactly the parts {' and '.join(LINEAR)}", SAVE_AGAIN)
    a, b = (adapter.weights.tensors[parts[name]].shape for name in LINEAR)
    rank = adapter.config.rank(experts.parameter)
    if a != (rank * experts.experts, experts.inside) or b != (experts.outside, rank * experts.experts):
        raise _fault(
            adapter,
            first,
            f"A {a} and B {b} of rank {rank} do not fit the {experts.experts} experts of {experts.parameter}, "
            f"{experts.outside} by {experts.inside} each",
            WRONG_BASE,
        )
    factors, scale = (parts[LINEAR[0]], parts[LINEAR[1]]), adapter.config.scale(experts.parameter)
    return {
        name: Update(factors=factors, scale=scale, transposed=piece.transposed, piece=piece)
        for name, piece in experts.pieces.items()
    }


def _require_fit(adapter: Adapter, name: str, update: Update, base: Mapping[str, TensorEntry]) -> None:
    key = update.replacement or (update.factors or ("",))[0]
    if name not in base:
        raise _fault(adapter, key, f"the base has no tensor {name}", WRONG_BASE)
    if base[name].dtype not in FLOAT_TYPES:
        raise _fault(
            adapter,
            key,
            f"{name} is {base[name].dtype} in the base; the merge supports {', '.join(FLOAT_TYPES)}",
            WRONG_BASE,
        )
    shape = adapter.weights.tensors[key].shape if update.replacement else base[name].shape
    if shape != base[name].shape:
        raise _fault(adapter, key, f"has shape {shape}, {name} of the base has {base[name].shape}", WRONG_BASE)


def _require_saved(
    adapter: Adapter,
    layers: Mapping[str, Any],
    updates: Mapping[str, Update],
    base: Mapping[str, TensorEntry],
) -> None:
    """Refuse an adapter that lacks a tensor that was trained as a whole, according to its configuration."""
    config = adapter.config
    for name in base:
        module, _, kind = name.rpartition(".")
        trained_bias = kind == "bias" and (config.bias == "all" or (config.bias == "lora_only" and module in layers))
        if (trained_bias or config.saves(module)) and (name not in updates or not updates[name].replacement):
            raise VlmflowError(
                f"{adapter.weights.path}: has no {name}, though it was trained: {ADAPTER_CONFIG} has "
                f"bias = {config.bias}, modules_to_save = {config.modules_to_save} "
                "(peft 0.20 saves no bias with lora_only)",
                "train again with bias none or all, and the layers in modules_to_save saved",
            )


def _fault(adapter: Adapter, key: str, what: str, next_step: str) -> VlmflowError:
    return VlmflowError(f"{adapter.weights.path}: {key}: {what}", next_step)
