"""What a merge would do, before it does it: which tensors it touches, and how much of the update rounding leaves."""

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
"""So much of the weights is read to measure rounding: a sample is enough for a mean, and a GPU waits meanwhile."""

VISIBLE = 0.75
"""Share of the update that rounding must leave, or the merged model's logits may show too little of the adapter."""


@dataclass(frozen=True)
class MergePlan:
    """weights: the base's. adapter: its configuration and header. tensors: the base's by name. updates: by tensor."""

    weights: ModelWeights
    adapter: Adapter
    tensors: dict[str, TensorEntry]
    updates: dict[str, Update]

    def describe(self) -> PlannedMerge:
        """Count touched tensors, those of each kind of layer, and all; say what rounding leaves of the updates."""
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
        """Give the share of the update that rounding leaves, <round(W + s·BA) - W, s·BA> / |s·BA|², in the middle.

        Measured on a sample of plain low-rank updates; None where there are none, or the adapter changed nothing.
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
    """Read base and adapter without their weights, and say what the merge would do.

    base: the base model's folder. files: the names of the model's files in it. adapter: the folder with
    adapter_model.safetensors and adapter_config.json.

    Raises VlmflowError where either is broken, they do not fit, or the adapter is of a kind that is not merged.
    """
    weights = read_model_weights(base, files)
    trained = read_adapter(adapter)
    tensors = weights.tensors()
    return MergePlan(weights, trained, tensors, plan_updates(trained, tensors, weights.config))
