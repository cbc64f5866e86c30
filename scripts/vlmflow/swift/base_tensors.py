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

import msgspec
from transformers.core_model_loading import revert_weight_conversion

from vlmflow.swift.description import describe
from vlmflow.swift.limited_child import limited
from vlmflow.swift.meta_model import Loading, experts_of, meta_model

OF_NO_USE = re.compile(r"rotary_emb\.inv_freq$|(^|\.)position_ids$")
"""Tensors of old checkpoints that transformers computes since then (5.19, `_adjust_missing_and_unexpected_keys`)."""


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
    needed, found = _places(loading, revert_weight_conversion(model, weights)), _places(loading, names)
    missing = {
        name
        for place in needed.keys() - model.all_tied_weights_keys.keys()
        for name in needed[place] - found[place]
        if not found[place] or (len(found[place]) < len(needed[place]) and loading.converts(found[place]))
    }
    ignored = model._keys_to_ignore_on_load_unexpected or ()
    unneeded = {
        name
        for place in found.keys() - weights.keys()
        for name in found[place]
        if not OF_NO_USE.search(name) and not any(re.search(pattern, name) for pattern in ignored)
    }
    described = msgspec.to_builtins(describe(model, loading, experts_of(model).values(), names))
    return {"missing": sorted(missing), "unneeded": sorted(unneeded), "model": described}


def _places(loading: Loading, names: Iterable[str]) -> defaultdict[str, set[str]]:
    """Return the names in files by where they are loaded; several that become one tensor have one place."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for name in names:
        found[loading.place(name)].add(name)
    return found
