"""Where an adapter's update of a layer's experts belongs in the base's files.

Since transformers 5 a parameter with three dimensions has one matrix per expert of a layer. peft adapts it as a whole
(`target_parameters`; tuners/lora/layer.py, `ParamWrapper`), with r rows of A and r columns of B per expert. The files
have one tensor with all matrices, or one or several per expert; transformers' rules of loading say which.

A checkpoint of the model's own weights, as the tuner full leaves it, and how it changes the base's tensors.

transformers writes its files (modeling_utils.py, `save_pretrained`): the names of tensors are those of the base's
files, the types are those of the training, and the division into shards is its own. Matrices of experts that it
transposes as it loads them, because their shape says so, it saves as in memory (`core_model_loading.Transpose`).

Plans a merge: which tensors it touches, and how much of the update rounding keeps.
"""

import statistics
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from transformers.core_model_loading import Concatenate, MergeModulelist, Transpose, dot_natural_key

from vlmflow.config.strategies import FULL, LORA, Tuner
from vlmflow.core.account import read_account
from vlmflow.core.errors import VlmflowError
from vlmflow.fetch.model_weights import ModelWeights, TensorEntry, read_header, read_model_weights
from vlmflow.in_trainer.messages import LOGITS, TRAINED, TrainedTensors
from vlmflow.merging.adapter import (
    INPUT_EMBEDDINGS,
    OUTPUT_HEADS,
    Adapter,
    ExpertLayer,
    Piece,
    Update,
    load_factors,
    load_finite,
    of_each_matrix,
    plan_updates,
    read_adapter,
)
from vlmflow.merging.tensors import FLOAT_TYPES, read_rows
from vlmflow.supervisor.report import PlannedMerge, released_files
from vlmflow.swift.child_process import limited
from vlmflow.swift.meta_model import Loading, meta_model


def expert_layers(base: Path, shapes: Mapping[str, Sequence[int]], targets: Collection[str]) -> dict[str, ExpertLayer]:
    """Return the parameters of experts that an adapter changes, by the name of their layer in the adapter.

    base: the model's folder. shapes: those of all tensors in its files, by name. targets: the adapter's
    `target_parameters`, each the whole name of a parameter or its end.

    Raises VlmflowError if the model cannot be built, or its files have experts in a form that the merge does not know.
    """
    found = limited(partial(_expert_layers, base, shapes, targets))
    if "failed" in found:
        raise VlmflowError(
            f"{base}: the places of its experts in its files are not known: {found['failed']}",
            "train without runs.NAME.train.lora.experts, or report this with the model's config.json",
        )
    return msgspec.convert(found, dict[str, ExpertLayer])


def _expert_layers(base: Path, shapes: Mapping[str, Sequence[int]], targets: Collection[str]) -> dict[str, Any]:
    model = meta_model(base)
    if model is None:
        raise ValueError("transformers does not know the class of its config.json, or it is quantised")
    loading = Loading(model, model.state_dict())
    sources: defaultdict[str, list[str]] = defaultdict(list)
    for name in shapes:
        sources[loading.place(name)].append(name)
    layers = {}
    for place, module in model.named_modules():
        adapted = [name for name, _ in module.named_parameters(recurse=False) if _is_named(f"{place}.{name}", targets)]
        # peft wraps the module once per parameter, in their order: the last one's factors are outermost.
        for wrappers, name in enumerate(reversed(adapted)):
            parameter = f"{place}.{name}"
            weight = module.get_parameter(name)
            if weight.ndim == 3:
                turned = bool(getattr(module, "is_transposed", False))
                layer = _layer(loading, parameter, weight, turned, {name: shapes[name] for name in sources[parameter]})
                layers[".".join([place, *["base_layer"] * wrappers])] = msgspec.to_builtins(layer)
    return layers


def _is_named(parameter: str, targets: Collection[str]) -> bool:
    """Return whether peft takes a parameter for one of `targets` (tuners_utils.py, `_inject_parameters`)."""
    return any(parameter == target or parameter.endswith(f".{target}") for target in targets)


def _layer(
    loading: Loading, parameter: str, weight: torch.Tensor, turned: bool, shapes: Mapping[str, Sequence[int]]
) -> ExpertLayer:
    """Return an adapted parameter with its pieces. turned: whether its matrices are in by out. shapes: of its tensors.

    Raises ValueError for an unknown form.
    """
    experts, rows, columns = weight.shape
    inside, outside = (rows, columns) if turned else (columns, rows)
    first = next(iter(shapes), "")
    operations, patterns, _ = loading.conversion(first)
    kinds = [type(operation) for operation in operations]
    if len(shapes) == 1 and len(shapes[first]) == 3 and kinds in ([], [Transpose]):
        swapped = _is_swapped(operations, shapes[first], weight.shape)
        pieces = {first: Piece(experts, None, 0, outside, turned != swapped)}
    elif not turned and _stacks(operations):
        pieces = {}
        height = outside // len(patterns)
        for number, pattern in enumerate(patterns):
            names = [name for name in shapes if loading.conversion(name)[2] == pattern]
            for expert, name in enumerate(sorted(names, key=dot_natural_key)):
                pieces[name] = Piece(experts, expert, number * height, (number + 1) * height, False)
        fitting = all(tuple(shape) == (height, inside) for shape in shapes.values())
        if len(pieces) != experts * len(patterns) or height * len(patterns) != outside or not fitting:
            raise ValueError(f"{parameter} of {experts} experts has {len(shapes)} tensors of another number or shape")
    else:
        how = ", ".join(kind.__name__ for kind in kinds) or "nothing"
        raise ValueError(f"{parameter} is made of {len(shapes)} tensors by {how}")
    return ExpertLayer(parameter, experts, inside, outside, pieces)


def _is_swapped(operations: Sequence[Any], stored: Sequence[int], wanted: Sequence[int]) -> bool:
    """Return whether the files have each matrix transposed; most rules of transformers ask the shapes."""
    swapped = [not operation.check_dims or tuple(stored) != tuple(wanted) for operation in operations]
    is_swapped = bool(swapped and swapped[0])
    experts, rows, columns = wanted
    if tuple(stored) != ((experts, columns, rows) if is_swapped else tuple(wanted)):
        raise ValueError(f"a tensor of shape {tuple(stored)} does not become one of {tuple(wanted)}")
    return is_swapped


def _stacks(operations: Sequence[Any]) -> bool:
    """Return whether operations stack a matrix per expert, after those of the same rows are put below each other."""
    kinds = [(type(operation), operation.dim) for operation in operations if hasattr(operation, "dim")]
    stack = (MergeModulelist, 0)
    return len(kinds) == len(operations) and kinds in ([stack], [stack, (Concatenate, 1)])


TRAIN_AGAIN = "remove the folder and run the same command again: it is copied from its run folder"

TRAIN_OTHERWISE = (
    "train an adapter instead (runs.NAME.tuner: lora): the merge takes over only weights that the base has under the "
    "same names"
)


@dataclass(frozen=True)
class TrainedModel:
    """tensors: the file of each tensor, and its place there, by name. trained: the names of those that were trained."""

    folder: Path
    tensors: dict[str, tuple[Path, TensorEntry]]
    trained: list[str]

    def place(self, key: str) -> tuple[Path, TensorEntry]:
        """Return the file of a tensor, and its place there."""
        return self.tensors[key]


def read_trained_model(folder: Path) -> TrainedModel:
    """Read the headers of the weights in `checkpoints/RUN/{smoke,full}` or in a checkpoint.

    Raises VlmflowError if a file is missing or damaged.
    """
    try:
        released = released_files(folder, FULL)
    except (OSError, ValueError, SafetensorError) as error:
        raise VlmflowError(f"{folder}: its weights cannot be read: {error}", TRAIN_AGAIN) from None
    trained = read_account(folder / TRAINED, TrainedTensors).tensors
    headers = [read_header(folder / name) for name in released if name.endswith(".safetensors") and name != LOGITS]
    tensors = {name: (header.path, entry) for header in headers for name, entry in header.tensors.items()}
    return TrainedModel(folder, tensors, trained)


def plan_replacements(
    model: TrainedModel, base: Mapping[str, TensorEntry], config: Mapping[str, Any]
) -> dict[str, Update]:
    """Return the update of every trained tensor of the base, by its name: the checkpoint's tensor replaces it.

    base: the base's tensors by name. config: the base's config.json.

    Raises VlmflowError with the name of a trained tensor that has no place in the base or another shape, of a tensor
    that only one of the two has, or of an embedding that the base stores twice.
    """
    for name in model.trained:
        if name not in base:
            raise _fault(model, name, "was trained, but the base has no tensor of this name")
        if name not in model.tensors:
            raise _fault(model, name, "was trained, but the checkpoint does not have it")
        (_, found), expected = model.tensors[name], base[name]
        if found.shape != expected.shape and not _swaps(found, expected):
            raise _fault(model, name, f"has shape {found.shape}, in the base {expected.shape}")
        for which, entry in (("checkpoint", found), ("base", expected)):
            if entry.dtype not in FLOAT_TYPES:
                supported = ", ".join(FLOAT_TYPES)
                raise _fault(model, name, f"is {entry.dtype} in the {which}; the merge supports {supported}")
    if not model.trained:
        raise VlmflowError(f"{model.folder / TRAINED}: names no trained tensor", TRAIN_OTHERWISE)
    for name in model.tensors:
        if name not in base:
            raise _fault(model, name, "is in the checkpoint, but not in the base")
    tied = _stored_twice(base, config)
    for name in base:
        if name not in model.tensors and not (tied and _last(name) in INPUT_EMBEDDINGS + OUTPUT_HEADS):
            raise _fault(model, name, "is in the base, but not in the checkpoint")
    if tied and any(_last(name) in INPUT_EMBEDDINGS + OUTPUT_HEADS for name in model.trained):
        raise VlmflowError(
            f"{model.folder}: the token embeddings were trained, which the base stores twice ({', '.join(tied)}), "
            "although it ties them (tie_word_embeddings)",
            "remove the second copy from the base's files, or untie it (config.json), and train again",
        )
    return {name: Update(replacement=name, swaps=_swaps(model.place(name)[1], base[name])) for name in model.trained}


def as_in_base(rows: torch.Tensor, entry: TensorEntry, swaps: bool) -> torch.Tensor:
    """Return rows of a checkpoint's tensor, which stands at `entry`, in the base's layout. swaps: see `Update`."""
    return rows.view(-1, *entry.shape[1:]).mT.flatten(1) if swaps else rows


def _swaps(found: TensorEntry, expected: TensorEntry) -> bool:
    """Return whether each matrix of a tensor has as many rows in the checkpoint as columns in the base."""
    return found.shape != expected.shape and found.matrices_transposed == expected.shape


def _stored_twice(base: Mapping[str, TensorEntry], config: Mapping[str, Any]) -> list[str]:
    """Return the names of both copies if the base ties its embeddings to the output head, but stores both."""
    if not any(part.get("tie_word_embeddings") for part in (config, config.get("text_config") or {})):
        return []
    names = {kind: [name for name in base if _last(name) in kind] for kind in (INPUT_EMBEDDINGS, OUTPUT_HEADS)}
    return [*names[INPUT_EMBEDDINGS], *names[OUTPUT_HEADS]] if all(names.values()) else []


def _last(name: str) -> str:
    """Return the name of a tensor's layer in its block: q_proj."""
    return name.rpartition(".")[0].rpartition(".")[2]


def _fault(model: TrainedModel, name: str, what: str) -> VlmflowError:
    return VlmflowError(f"{model.folder}: tensor {name} {what}", TRAIN_OTHERWISE)


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
    a training with `tuner` releases (`supervisor.report`).

    Raises VlmflowError if either is damaged, they do not fit, or the adapter is of a kind that cannot be merged.
    """
    weights = read_model_weights(base, files)
    tensors = weights.tensors()
    if tuner.trains_adapter:
        adapter = read_adapter(released)
        names = _names_in_memory(base, tensors, adapter)
        in_memory = {names.get(name, name): entry for name, entry in tensors.items()}
        updates = plan_updates(adapter, in_memory, weights.config, _planned_expert_layers(base, tensors, adapter))
        stored = {in_memory: name for name, in_memory in names.items()}
        return MergePlan(weights, adapter, tensors, {stored.get(name, name): each for name, each in updates.items()})
    model = read_trained_model(released)
    return MergePlan(weights, model, tensors, plan_replacements(model, tensors, weights.config))


def _names_in_memory(base: Path, tensors: Collection[str], adapter: Adapter) -> dict[str, str]:
    """Return the names in memory by those of the base's files; {} if the adapter has the latter."""
    if adapter.changes().issubset(tensors):
        return {}
    from vlmflow.merging.tensors import loaded_as  # most models need no import of transformers here

    return loaded_as(base, tensors)


def _planned_expert_layers(base: Path, tensors: Mapping[str, TensorEntry], adapter: Adapter) -> dict[str, ExpertLayer]:
    """Return the parameters of experts that the adapter changes, by the name of their layer in it."""
    if not adapter.config.target_parameters:
        return {}
    # as above

    shapes = {name: entry.shape for name, entry in tensors.items()}
    return expert_layers(base, shapes, adapter.config.target_parameters)


def _first_rows(file: Path, entry: TensorEntry, rows: int) -> torch.Tensor:
    """Return the first rows of a tensor, as a matrix in its own type."""
    stored = torch.empty((rows, entry.columns), dtype=FLOAT_TYPES[entry.dtype])
    with file.open("rb") as source:
        read_rows(source.fileno(), entry, 0, stored)
    return stored
