"""Plans a merge: which tensors it touches, and how much of the update rounding keeps."""

import statistics
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from vlmflow.config.tuners import LORA, Tuner
from vlmflow.fetch.model_weights import ModelWeights, read_model_weights
from vlmflow.fetch.safetensors_header import TensorEntry
from vlmflow.merging.adapter import (
    Adapter,
    ExpertLayer,
    Update,
    load_factors,
    load_finite,
    of_each_matrix,
    plan_updates,
    read_adapter,
)
from vlmflow.merging.safetensors_file import FLOAT_TYPES, read_rows
from vlmflow.merging.trained_model import TrainedModel, as_in_base, plan_replacements, read_trained_model
from vlmflow.supervisor.accounts import PlannedMerge

SAMPLED_TENSORS = 16
SAMPLED_ROWS = 64
"""Limits of the sample of weights that measures rounding: it is enough for a median, and a GPU waits meanwhile."""

VISIBLE = 0.75
"""The share of the update that rounding must keep; below it, the merged model's logits may not show the adapter."""


@dataclass(frozen=True)
class MergePlan:
    """weights, tensors: those of the base. trained: what the training released. updates: by the base's tensor."""

    weights: ModelWeights
    trained: Adapter | TrainedModel
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

        It is measured on a sample of plain low-rank updates; after a training of the weights themselves, on a sample of
        these, with their change in the place of s·BA. None if there are none, or the training changed nothing.
        """
        plain = sorted(name for name, update in self.updates.items() if not update.magnitude and self._is_plain(update))
        chosen = plain[:: max(1, len(plain) // SAMPLED_TENSORS)]
        files = {name: file.path for file in self.weights.shards.values() for name in file.tensors}
        shares = [share for name in chosen if (share := self._share(name, files[name])) is not None]
        return round(statistics.median(shares), 3) if shares else None

    def _is_plain(self, update: Update) -> bool:
        return bool(update.factors) or isinstance(self.trained, TrainedModel)

    def _share(self, name: str, file: Path) -> float | None:
        entry, update = next(of_each_matrix(self.tensors[name], self.updates[name]))
        rows = min(SAMPLED_ROWS if len(entry.shape) < 3 else 1, entry.rows)  # a row of experts is a whole matrix
        stored = _first_rows(file, entry, rows)
        if isinstance(self.trained, TrainedModel):
            place, start = self.trained.place(name)
            trained = as_in_base(_first_rows(place, start, rows), start, update.swaps)
            change = trained.float() - stored.float()
        else:
            left, right = load_factors(partial(load_finite, self.trained), update)
            change = update.scale * left[:rows] @ right
        kept = (stored.float() + change).to(stored.dtype).float() - stored.float()
        squared = change.double().square().sum().item()
        return (kept.double() * change).sum().item() / squared if squared else None


def plan_merge(base: Path, released: Path, files: Collection[str], tuner: Tuner = LORA) -> MergePlan:
    """Read the base and what a training released, without their weights, and return the plan of their merge.

    base: the base model's folder. files: the names of the model's files in it. released: the folder with the files that
    a training with `tuner` releases (`supervisor.released`).

    Raises VlmflowError if either is damaged, they do not fit, or the adapter is of a kind that cannot be merged.
    """
    weights = read_model_weights(base, files)
    tensors = weights.tensors()
    if tuner.trains_adapter:
        adapter = read_adapter(released)
        names = _names_in_memory(base, tensors, adapter)
        in_memory = {names.get(name, name): entry for name, entry in tensors.items()}
        updates = plan_updates(adapter, in_memory, weights.config, _expert_layers(base, tensors, adapter))
        stored = {in_memory: name for name, in_memory in names.items()}
        return MergePlan(weights, adapter, tensors, {stored.get(name, name): each for name, each in updates.items()})
    model = read_trained_model(released)
    return MergePlan(weights, model, tensors, plan_replacements(model, tensors, weights.config))


def _names_in_memory(base: Path, tensors: Collection[str], adapter: Adapter) -> dict[str, str]:
    """Return the names in memory by those of the base's files; {} if the adapter has the latter."""
    if adapter.changes().issubset(tensors):
        return {}
    from vlmflow.merging.names_in_memory import loaded_as  # most models need no import of transformers here

    return loaded_as(base, tensors)


def _expert_layers(base: Path, tensors: Mapping[str, TensorEntry], adapter: Adapter) -> dict[str, ExpertLayer]:
    """Return the parameters of experts that the adapter changes, by the name of their layer in it."""
    if not adapter.config.target_parameters:
        return {}
    from vlmflow.merging.expert_tensors import expert_layers  # as above

    shapes = {name: entry.shape for name, entry in tensors.items()}
    return expert_layers(base, shapes, adapter.config.target_parameters)


def _first_rows(file: Path, entry: TensorEntry, rows: int) -> torch.Tensor:
    """Return the first rows of a tensor, as a matrix in its own type."""
    stored = torch.empty((rows, entry.columns), dtype=FLOAT_TYPES[entry.dtype])
    with file.open("rb") as source:
        read_rows(source.fileno(), entry, 0, stored)
    return stored
