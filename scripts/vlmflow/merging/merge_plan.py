"""Plans a merge: which tensors it touches, and how much of the update rounding keeps."""

import statistics
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch

from vlmflow.merging.adapter import Adapter, Update, load_factors, plan_updates, read_adapter
from vlmflow.merging.model_weights import ModelWeights, read_model_weights
from vlmflow.merging.safetensors_file import FLOAT_TYPES, TensorEntry, read_rows
from vlmflow.training.accounts import PlannedMerge

SAMPLED_TENSORS = 16
SAMPLED_ROWS = 64
"""Limits of the sample of weights that measures rounding: it is enough for a median, and a GPU waits meanwhile."""

VISIBLE = 0.75
"""The share of the update that rounding must keep; below it, the merged model's logits may not show the adapter."""


@dataclass(frozen=True)
class MergePlan:
    """weights, tensors: those of the base. adapter: its configuration and header. updates: by the base's tensor."""

    weights: ModelWeights
    adapter: Adapter
    tensors: dict[str, TensorEntry]
    updates: dict[str, Update]

    def describe(self) -> PlannedMerge:
        """Return the numbers of tensors, touched ones, and those of each kind of layer, and what rounding keeps."""
        layers = Counter(name.rpartition(".")[0].rpartition(".")[2] for name in self.updates)
        left = self.rounding_leaves()
        return PlannedMerge(
            tensors=len(self.tensors),
            touched=len(self.updates),
            layers=dict(sorted(layers.items())),
            rounding_leaves=left,
            logits_may_be_inconclusive=left is not None and left < VISIBLE,
        )

    def rounding_leaves(self) -> float | None:
        """Return the median share of the update that rounding keeps, <round(W + s·BA) - W, s·BA> / |s·BA|².

        It is measured on a sample of plain low-rank updates; None if there are none, or the adapter changed nothing.
        """
        plain = sorted(name for name, update in self.updates.items() if update.factors and not update.magnitude)
        chosen = plain[:: max(1, len(plain) // SAMPLED_TENSORS)]
        files = {name: file.path for file in self.weights.shards.values() for name in file.tensors}
        shares = [share for name in chosen if (share := self._share(name, files[name])) is not None]
        return round(statistics.median(shares), 3) if shares else None

    def _share(self, name: str, file: Path) -> float | None:
        entry, update = self.tensors[name], self.updates[name]
        left, right = load_factors(self.adapter, update)
        rows = min(SAMPLED_ROWS, entry.rows)
        stored = torch.empty((rows, entry.columns), dtype=FLOAT_TYPES[entry.dtype])
        with file.open("rb") as source:
            read_rows(source.fileno(), entry, 0, stored)
        change = update.scale * left[:rows] @ right
        kept = (stored.float() + change).to(stored.dtype).float() - stored.float()
        squared = change.double().square().sum().item()
        return (kept.double() * change).sum().item() / squared if squared else None


def plan_merge(base: Path, adapter: Path, files: Collection[str]) -> MergePlan:
    """Read base and adapter without their weights, and return the plan of their merge.

    base: the base model's folder. files: the names of the model's files in it. adapter: the folder with
    adapter_model.safetensors and adapter_config.json.

    Raises VlmflowError if either is damaged, they do not fit, or the adapter is of a kind that cannot be merged.
    """
    weights = read_model_weights(base, files)
    trained = read_adapter(adapter)
    tensors = weights.tensors()
    return MergePlan(weights, trained, tensors, plan_updates(trained, tensors, weights.config))
