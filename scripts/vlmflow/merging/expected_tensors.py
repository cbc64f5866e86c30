"""The values that a proven folder's tensors must have: base + adapter, or the trained weights.

It uses neither the merge's arithmetic nor its reader: the safetensors package opens the files, and the scale comes from
peft's own configuration. Of a model with experts, peft itself wraps the model, which shows whose factors are whose, and
transformers saves numbers that name their own places, which shows where they go.
"""

import json
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import ParamWrapper
from peft.utils.other import get_pattern_key
from safetensors import safe_open
from transformers.core_model_loading import revert_weight_conversion

from vlmflow.core.errors import VlmflowError
from vlmflow.in_trainer.messages import TRAINED
from vlmflow.swift.child_process import limited
from vlmflow.swift.meta_model import loaded_as, meta_model, saved_as

OF_PEFT = re.compile(r"\.(?:base_layer\.\w+|lora_[AB]\.weight|lora_embedding_[AB]|lora_magnitude_vector|weight|bias)$")
"""What stands behind the name of a layer in an adapter."""

FROZEN_ROWS = 1 << 12
"""Rows of a frozen tensor that are compared with the checkpoint's at a time."""


class OfExperts(msgspec.Struct, frozen=True):
    """What a tensor of the files has of an adapted parameter of experts, W (experts by rows by columns) in memory.

    layer: the name of its factors in the adapter, without `.lora_A.weight`. scale: of the update. out_by_in: whether
    each matrix of W is out by in. shape: W's. expert: the matrix; None for all of them. first: its first row in W.
    rows: how many.
    """

    layer: str
    scale: float
    out_by_in: bool
    shape: tuple[int, int, int]
    expert: int | None
    first: int
    rows: int


def expected_experts(base: Path, adapter: Path) -> dict[str, OfExperts]:
    """Return what the tensors of a base's files have of adapted experts, by name.

    base, adapter: their folders. Raises VlmflowError if the model cannot be built, or its saved form is unknown.
    """
    places = limited(partial(_expected_experts, base, adapter))
    if "failed" in places:
        raise VlmflowError(
            f"{base}: the places of its adapted experts cannot be computed: {places['failed']}",
            "report this, with the model's config.json and the adapter's adapter_config.json",
        )
    return msgspec.convert(places, dict[str, OfExperts])


def _expected_experts(base: Path, adapter: Path) -> dict[str, Any]:
    plain, adapted = meta_model(base), meta_model(base)
    if plain is None or adapted is None:
        raise ValueError("transformers does not know the class of its config.json, or it is quantised")
    with torch.device("meta"):
        wrapped = get_peft_model(adapted, LoraConfig.from_pretrained(str(adapter)))
    parts = {}
    for name, module in wrapped.named_modules():
        if isinstance(module, ParamWrapper) and module.get_param().ndim == 3:
            layer = name.removeprefix("base_model.model.")
            parameter = f"{layer.replace('.base_layer', '')}.{module.parameter_name}"
            experts, rows, columns = module.get_param().shape
            places = torch.arange(experts * rows).reshape(experts, rows, 1)
            for tensor, saved in revert_weight_conversion(plain, {parameter: places}).items():
                numbers = saved.flatten()
                first = int(numbers[0])
                if not torch.equal(numbers, torch.arange(first, first + len(numbers))):
                    raise ValueError(f"{tensor} has rows of {parameter} in another order")
                expert, row = (None, 0) if saved.ndim == 3 else divmod(first, rows)
                parts[tensor] = OfExperts(
                    layer=layer,
                    scale=module.scaling["default"],
                    out_by_in=module._did_swap_in_out_features,
                    shape=(experts, rows, columns),
                    expert=expert,
                    first=row,
                    rows=rows if expert is None else len(numbers),
                )
    return {tensor: msgspec.to_builtins(of) for tensor, of in parts.items()}


@dataclass(frozen=True)
class Expected:
    """The required value of a touched tensor: magnitude ⊙ V / ‖V‖, V = start + scale · left · right, in float64.

    lengths: those of right's columns. matrices: of a tensor with the matrices of all experts, the value of each.
    """

    start: torch.Tensor
    left: torch.Tensor | None = None
    right: torch.Tensor | None = None
    lengths: torch.Tensor | None = None
    scale: float = 0.0
    magnitude: torch.Tensor | None = None
    matrices: "list[Expected] | None" = None


class Updates:
    """The adapter's tensors by the base's names; `unused` are those not requested yet."""

    def __init__(self, folder: Path, base: Path, tensors: Collection[str]) -> None:
        """folder: the adapter's. base: the base's. tensors: the names of all tensors of the base's files."""
        self.path = folder / "adapter_model.safetensors"
        self.config = LoraConfig.from_pretrained(str(folder))
        self._file = safe_open(self.path, framework="pt")
        self.unused = set(self._file.keys())
        self._experts = expected_experts(base, folder) if self.config.target_parameters else {}
        self._names = _names_in_memory(self.unused, base, tensors, self._experts)

    def expected(self, name: str, weight: torch.Tensor) -> Expected | None:
        """Return the required value of the base's tensor `name`; None if the adapter does not touch it."""
        if of := self._experts.get(name):
            return self._of_experts(of, weight)
        name = self._names.get(name, name)
        module, _, kind = name.rpartition(".")
        start = self._take(f"{module}.base_layer.{kind}") or self._take(name)
        linear = self._take(f"{module}.lora_A.weight", f"{module}.lora_B.weight") if kind == "weight" else None
        transposed = self.config.fan_in_fan_out
        if kind == "weight" and linear is None:
            linear = self._take(f"{module}.lora_embedding_A", f"{module}.lora_embedding_B")
            transposed = True
        if linear is None:
            return Expected(*start) if start else None
        a, b = (factor.double() for factor in linear)
        left, right = (a.T, b.T) if transposed else (b, a)
        return Expected(
            start=start[0] if start else weight,
            left=left,
            right=right,
            lengths=torch.linalg.vector_norm(right, dim=0),
            scale=self._scale(module),
            magnitude=(self._take(f"{module}.lora_magnitude_vector") or [None])[0],
        )

    def _of_experts(self, of: OfExperts, weight: torch.Tensor) -> Expected:
        """Return the required value of a tensor with matrices of experts. weight: the base's."""
        keys = [f"base_model.model.{of.layer}.lora_{which}.weight" for which in "AB"]
        self.unused.difference_update(keys)
        a, b = (self._file.get_tensor(key) for key in keys)
        experts = of.shape[0]
        a, b = a.reshape(experts, -1, a.shape[1]), b.reshape(b.shape[0], -1, experts)

        def value(expert: int, start: torch.Tensor, *, transposed: bool) -> Expected:
            left, right = b[:, :, expert].double(), a[expert].double()
            if not of.out_by_in:
                left, right = right.T, left.T
            left = left[of.first : of.first + of.rows]
            if transposed:
                left, right = right.T, left.T
            return Expected(start, left, right, torch.linalg.vector_norm(right, dim=0), of.scale)

        if of.expert is not None:
            return value(of.expert, weight, transposed=False)
        transposed = weight.shape != of.shape  # transformers, too, asks the shape
        return Expected(
            weight, matrices=[value(number, weight[number], transposed=transposed) for number in range(experts)]
        )

    def _take(self, *names: str) -> list[torch.Tensor] | None:
        """Return tensors that belong together, or None if one is missing or already used."""
        keys = [f"base_model.model.{name}" for name in names]
        if not self.unused.issuperset(keys):
            return None
        self.unused.difference_update(keys)
        return [self._file.get_tensor(key) for key in keys]

    def _scale(self, module: str) -> float:
        config = self.config
        rank = config.rank_pattern.get(get_pattern_key(config.rank_pattern, module), config.r)
        alpha = config.alpha_pattern.get(get_pattern_key(config.alpha_pattern, module), config.lora_alpha)
        return float(alpha / math.sqrt(rank) if config.use_rslora else alpha / rank)


def _names_in_memory(
    keys: Collection[str], base: Path, tensors: Collection[str], experts: Mapping[str, OfExperts]
) -> dict[str, str]:
    """Return names in memory by those of the base's files; {} if the adapter has the latter.

    keys: the adapter's. experts: tensors of the base's files that have another place.
    """
    of_experts = {of.layer for of in experts.values()}
    layers = {OF_PEFT.sub("", key.removeprefix("base_model.model.")) for key in keys} - of_experts
    if layers <= {name.rpartition(".")[0] for name in tensors}:
        return {}
    names = saved_as(base)
    # Files of before may have names under which transformers no longer saves; only its rules of loading know them.
    return names if names.keys() | experts.keys() >= set(tensors) else loaded_as(base, tensors)


class TrainedWeights:
    """A checkpoint's trained tensors by the base's names; `unused` are those not requested yet."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / TRAINED
        self.unused = set(json.loads(self.path.read_bytes())["tensors"])
        files = [safe_open(path, framework="pt") for path in folder.glob("model*.safetensors")]
        self._files = {name: file for file in files for name in file.keys()}  # noqa: SIM118 (no mapping)

    def expected(self, name: str, weight: torch.Tensor) -> Expected | None:
        """Return the required value of the base's tensor `name`; None if it was frozen.

        Raises VlmflowError if it was frozen, but the checkpoint has other numbers than the base.
        """
        if name in self.unused:
            self.unused.discard(name)
            return Expected(self._tensor(name, weight))
        if name in self._files:
            kept = self._tensor(name, weight)
            for first in range(0, max(1, len(kept)) if kept.ndim else 1, FROZEN_ROWS):
                rows = slice(first, first + FROZEN_ROWS) if kept.ndim else ...
                if not torch.equal(kept[rows], weight[rows].to(kept.dtype)):
                    raise VlmflowError(
                        f"{self.path.parent}: tensor {name} is frozen (runs.NAME.train.freeze), but the training "
                        "changed it",
                        "report this: the trainer must not touch frozen weights",
                    )
        return None

    def _tensor(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """Return the checkpoint's tensor in the base's layout.

        transformers saves experts' matrices that it transposed when it loaded them as they are in memory. It told them
        by their shape, so a shape says it here as well: those that are square were not transposed.
        """
        tensor: torch.Tensor = self._files[name].get_tensor(name)
        if tensor.shape != weight.shape and tensor.ndim == 3 and tensor.mT.shape == weight.shape:
            return tensor.mT.contiguous()
        return tensor
