"""The names that a model's tensors have in memory, where transformers renames them as it loads them.

An adapter has the names in memory, the base those of its files. The merge finds one by the rules of loading; the proof
of its result by those of saving, so that it does not repeat an error.
"""

from collections import Counter
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

from transformers.core_model_loading import revert_weight_conversion

from vlmflow.swift.limited_child import limited
from vlmflow.swift.meta_model import Loading, meta_model


def loaded_as(base: Path, names: Collection[str]) -> dict[str, str]:
    """Return the name in memory of every tensor of a model that is loaded as it is, by its name in the files.

    base: the model's folder. names: those of all its tensors. Returns {} if transformers cannot build the model.
    """
    found: dict[str, str] = limited(partial(_loaded_as, base, names)).get("names", {})
    return found


def saved_as(base: Path) -> dict[str, str]:
    """Return the same by the names under which transformers would save the model."""
    found: dict[str, str] = limited(partial(_saved_as, base)).get("names", {})
    return found


def _loaded_as(base: Path, names: Collection[str]) -> dict[str, Any]:
    model = meta_model(base)
    if model is None:
        return {}
    loading = Loading(model, model.state_dict())
    places = {name: loading.place(name) for name in names if not loading.converts([name])}
    filled = Counter(places.values())
    return {"names": {name: place for name, place in places.items() if filled[place] == 1}}


def _saved_as(base: Path) -> dict[str, Any]:
    model = meta_model(base)
    if model is None:
        return {}
    saved = {name: list(revert_weight_conversion(model, {name: weight})) for name, weight in model.state_dict().items()}
    return {"names": {names[0]: name for name, names in saved.items() if len(names) == 1}}
