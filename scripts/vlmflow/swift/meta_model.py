"""A model as transformers builds it from its config.json, without memory for weights, and its names of tensors.

It says by which names it would load and save them. Those that its configuration needs are compared with those that its
files have, because transformers draws random numbers for what is missing, and only logs it.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    ConversionOps,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.models.auto import modeling_auto

from vlmflow.swift.child_process import limited
from vlmflow.swift.model_layers import describe

OF_NO_USE = re.compile(r"rotary_emb\.inv_freq$|(^|\.)position_ids$")
"""Tensors of old checkpoints that transformers computes since then (5.19, `_adjust_missing_and_unexpected_keys`)."""


def meta_model(folder: Path) -> PreTrainedModel | None:
    """Return the model; None if it is quantised, or transformers does not know its class by its config.json.

    Call it in a child with limits (`limited_child`): config.json is its owner's. Raises whatever transformers raises.
    """
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    return None if getattr(config, "quantization_config", None) else built(config, attn_implementation="eager")


def built(config: PreTrainedConfig, **options: Any) -> PreTrainedModel | None:
    """Return the model of a configuration, as `meta_model` does. options: of `PreTrainedModel._from_config`."""
    model_class = class_of(config)
    if model_class is None:
        return None
    with torch.device("meta"):
        model: PreTrainedModel = model_class._from_config(config, **options)
    return model


def class_of(config: Any) -> Any:
    """Return the class of models with a configuration; None if transformers does not know one."""
    kinds = [modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING]
    return next((mapping[type(config)] for mapping in kinds if type(config) in mapping), None)


def experts_of(model: PreTrainedModel) -> dict[str, torch.nn.Parameter]:
    """Return the parameters of a model that have a matrix for each expert, by their names."""
    return {
        f"{path}.{name}": weight
        for path, module in model.named_modules()
        if type(module).__name__.endswith("Experts")  # transformers calls all of them so
        for name, weight in module.named_parameters(recurse=False)
        if weight.ndim == 3
    }


class Loading:
    """Where transformers loads the tensors of a model's files."""

    def __init__(self, model: PreTrainedModel, weights: dict[str, torch.Tensor]) -> None:
        """weights: the model's tensors by their names in memory."""
        rules = get_model_conversion_mapping(model)
        renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        self._rules: Any = renamings, converters, model.base_model_prefix, weights
        self._converters = {pattern: converter for converter in converters for pattern in converter.source_patterns}

    def target(self, name: str) -> str:
        """Return the name in memory of a tensor of the files, or of the tensor that it becomes a part of."""
        return str(rename_source_key(name, *self._rules)[0])

    def converts(self, names: Iterable[str]) -> bool:
        """Return whether all of these tensors are converted as they are loaded: gathered, split, transposed."""
        return all(rename_source_key(name, *self._rules)[1] for name in names)

    def conversion(self, name: str) -> tuple[list[ConversionOps], list[str], str | None]:
        """Return the operations that convert a tensor, the patterns of what they join, and the one that it matches."""
        pattern = rename_source_key(name, *self._rules)[1]
        if pattern is None:
            return [], [], None
        converter = self._converters[pattern]
        return converter.operations, converter.source_patterns, pattern


def compare_tensors(folder: Path, names: Iterable[str]) -> dict[str, Any]:
    """Return the names of the tensors that a model lacks ("missing"), and of those that nothing loads ("unneeded").

    "model" is what the model says of itself (`description.Description`).

    folder: the model's, without weights. names: those in its files.
    A model that is quantised, or whose class transformers does not know by its config.json, is not compared: {}.
    Returns {"failed": why} if transformers cannot build the model.
    """
    return limited(partial(_compare, folder, names))


def _compare(folder: Path, names: Iterable[str]) -> dict[str, Any]:
    model = meta_model(folder)
    if model is None:
        return {}
    weights = model.state_dict()
    loading = Loading(model, weights)
    needed, present = _places(loading, revert_weight_conversion(model, weights)), _places(loading, names)
    missing = {
        name
        for target in needed.keys() - model.all_tied_weights_keys.keys()
        for name in needed[target] - present[target]
        if not present[target] or (len(present[target]) < len(needed[target]) and loading.converts(present[target]))
    }
    ignored = model._keys_to_ignore_on_load_unexpected or ()
    unneeded = {
        name
        for target in present.keys() - weights.keys()
        for name in present[target]
        if not OF_NO_USE.search(name) and not any(re.search(pattern, name) for pattern in ignored)
    }
    described = msgspec.to_builtins(describe(model, loading, experts_of(model).values(), names))
    return {"missing": sorted(missing), "unneeded": sorted(unneeded), "model": described}


def _places(loading: Loading, names: Iterable[str]) -> defaultdict[str, set[str]]:
    """Return the names in files by where they are loaded; several that become one tensor have one place."""
    by_place: defaultdict[str, set[str]] = defaultdict(set)
    for name in names:
        by_place[loading.target(name)].add(name)
    return by_place


def loaded_as(base: Path, names: Collection[str]) -> dict[str, str]:
    """Return the name in memory of every tensor of a model that is loaded as it is, by its name in the files.

    base: the model's folder. names: those of all its tensors. Returns {} if transformers cannot build the model.
    """
    return dict(limited(partial(_loaded_as, base, names)).get("names", {}))


def saved_as(base: Path) -> dict[str, str]:
    """Return the same by the names under which transformers would save the model.

    The merge takes the rules of loading, and the proof of its result those of saving, so that it repeats no error.
    """
    return dict(limited(partial(_saved_as, base)).get("names", {}))


def _loaded_as(base: Path, names: Collection[str]) -> dict[str, Any]:
    model = meta_model(base)
    if model is None:
        return {}
    loading = Loading(model, model.state_dict())
    places = {name: loading.target(name) for name in names if not loading.converts([name])}
    filled = Counter(places.values())
    return {"names": {name: target for name, target in places.items() if filled[target] == 1}}


def _saved_as(base: Path) -> dict[str, Any]:
    model = meta_model(base)
    if model is None:
        return {}
    saved = {name: list(revert_weight_conversion(model, {name: weight})) for name, weight in model.state_dict().items()}
    return {"names": {names[0]: name for name, names in saved.items() if len(names) == 1}}
