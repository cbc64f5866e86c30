"""Compares the tensors that a model's configuration needs with those that its files have, by name.

transformers draws random numbers for what is missing, and only logs it. It builds the model here without memory for
weights, and says by which names it would load and save them.
"""

import re
from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    rename_source_key,
    revert_weight_conversion,
)

from vlmflow.swift.limited_child import limited

OF_NO_USE = re.compile(r"rotary_emb\.inv_freq$|(^|\.)position_ids$")
"""Tensors of old checkpoints that transformers computes since then (5.19, `_adjust_missing_and_unexpected_keys`)."""


def compare_tensors(folder: Path, names: Iterable[str]) -> dict[str, Any]:
    """Return the names of the tensors that a model lacks ("missing"), and of those that nothing loads ("unneeded").

    folder: the model's, without weights. names: those in its files.
    A model that is quantised, or whose class transformers does not know by its config.json, is not compared: {}.
    Returns {"failed": why} if transformers cannot build the model.
    """
    return limited(partial(_compare, folder, names))


def _compare(folder: Path, names: Iterable[str]) -> dict[str, Any]:
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    kinds: list[Any] = [MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING]
    kind = next((mapping[type(config)] for mapping in kinds if type(config) in mapping), None)
    if kind is None or getattr(config, "quantization_config", None):
        return {}
    with torch.device("meta"):
        model: PreTrainedModel = kind._from_config(config, attn_implementation="eager")
    weights = model.state_dict()
    places = _Places(model, weights)
    needed, found = places.of(revert_weight_conversion(model, weights)), places.of(names)
    missing = {
        name
        for place in needed.keys() - model.all_tied_weights_keys.keys()
        for name in needed[place] - found[place]
        if not found[place] or (len(found[place]) < len(needed[place]) and places.made_of_parts(found[place]))
    }
    ignored = model._keys_to_ignore_on_load_unexpected or ()
    unneeded = {
        name
        for place in found.keys() - weights.keys()
        for name in found[place]
        if not OF_NO_USE.search(name) and not any(re.search(pattern, name) for pattern in ignored)
    }
    return {"missing": sorted(missing), "unneeded": sorted(unneeded)}


class _Places:
    """Where transformers loads tensors: the names of its own, by those in files."""

    def __init__(self, model: PreTrainedModel, weights: dict[str, torch.Tensor]) -> None:
        rules = get_model_conversion_mapping(model)
        renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        self._rules: Any = renamings, converters, model.base_model_prefix, weights

    def of(self, names: Iterable[str]) -> defaultdict[str, set[str]]:
        """Return the names in files by where they are loaded; several that become one tensor have one place."""
        found: defaultdict[str, set[str]] = defaultdict(set)
        for name in names:
            found[rename_source_key(name, *self._rules)[0]].add(name)
        return found

    def made_of_parts(self, names: Iterable[str]) -> bool:
        """Return whether tensors of these names become a part of one (the matrices of single experts)."""
        return all(rename_source_key(name, *self._rules)[1] for name in names)
