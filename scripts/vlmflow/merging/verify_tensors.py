"""Verifies, tensor by tensor, that a folder has base + adapter and nothing else.

It does not use the merge's arithmetic: the safetensors package opens the files, the scale comes from peft's own
configuration, and sums are computed in float64. A touched tensor may deviate from such a sum by

- half an ulp of its type at the sum: the single rounding when it is stored, and
- γ (|W| + |s| ‖b‖ ‖a‖), γ = (r + 4) / 2^24, for a product over r terms that was added in float32: the bound
  of Higham, Accuracy and Stability of Numerical Algorithms, section 3.1, for a sum of r products, with two
  terms more for scale and addition and two of margin; ‖b‖ ‖a‖ bounds the sum of |b| |a| after Cauchy and
  Schwarz. With DoRA the same error enters the row's length, and three more roundings follow.
"""

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from peft import LoraConfig
from peft.utils.other import get_pattern_key
from safetensors import SafetensorError, safe_open

from vlmflow.core.errors import VlmflowError
from vlmflow.core.progress import Progress
from vlmflow.merging.proof import TensorProof
from vlmflow.merging.threads import run_in_order
from vlmflow.merging.verify_files import MERGE_AGAIN, verify_files

BLOCK_ELEMENTS = 1 << 17
"""Elements compared in one step: 1 MB in float64, which fits into a core's cache."""

TASK_BYTES = 1 << 24

ROUNDING = 2.0**-24
"""The relative error of one float32 operation."""

DORA_ROUNDINGS = 3
"""Length, quotient and product of magnitude ⊙ V / ‖V‖."""


@dataclass(frozen=True)
class Expected:
    """The required value of a touched tensor: magnitude ⊙ V / ‖V‖, V = start + scale · left · right, in float64.

    lengths: those of right's columns.
    """

    start: torch.Tensor
    left: torch.Tensor | None = None
    right: torch.Tensor | None = None
    lengths: torch.Tensor | None = None
    scale: float = 0.0
    magnitude: torch.Tensor | None = None


@dataclass(frozen=True)
class Compared:
    """The result of comparing some rows of one tensor."""

    tensor: str
    bytes: int
    touched: int = 0
    changed: int = 0
    deviation: float = 0.0


Task = Callable[[], Compared]


def verify_tensors(base: Path, adapter: Path, merged: Path, files: Collection[str], threads: int) -> TensorProof:
    """Compare the folder `merged` with base + adapter.

    base: the base model's folder. files: the names of the model's files in it.
    adapter: the folder with adapter_model.safetensors and adapter_config.json.
    threads: the number of cores to use.

    Raises VlmflowError with file and tensor at the first fault: a missing, new or changed file, a shard with another
    layout, a tensor with a wrong value, a tensor of the adapter without a place.
    """
    shards = verify_files(base, merged, files)
    total = sum((base / name).stat().st_size for name in shards)
    updates = Updates(adapter)
    names: dict[str, bool] = {}
    touched = changed = 0
    worst = Compared("", 0)
    with Progress(f"verify {merged}", total, "bytes") as progress:
        for name in shards:
            try:
                for result in run_in_order(_shard_tasks(base / name, merged / name, updates), threads):
                    names[result.tensor] = bool(result.touched) or names.get(result.tensor, False)
                    touched, changed = touched + result.touched, changed + result.changed
                    worst = max(worst, result, key=lambda compared: compared.deviation)
                    progress.advance(result.bytes)
            except SafetensorError as error:
                raise VlmflowError(f"{merged / name}: {error}", MERGE_AGAIN) from None
    if updates.unused:
        raise VlmflowError(f"{updates.path}: {min(updates.unused)} matches no tensor of the base", MERGE_AGAIN)
    return TensorProof(
        shards=len(shards),
        tensors=len(names),
        touched=sum(names.values()),
        untouched=len(names) - sum(names.values()),
        changed_share=changed / touched if touched else 0.0,
        largest_deviation=worst.deviation,
        largest_deviation_tensor=worst.tensor,
    )


class Updates:
    """The adapter's tensors by the base's names; `unused` are those not requested yet."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "adapter_model.safetensors"
        self.config = LoraConfig.from_pretrained(str(folder))
        self._file = safe_open(self.path, framework="pt")
        self.unused = set(self._file.keys())

    def expected(self, name: str, weight: torch.Tensor) -> Expected | None:
        """Return the required value of the base's tensor `name`; None if the adapter does not touch it."""
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


def _shard_tasks(base: Path, merged: Path, updates: Updates) -> Iterator[Task]:
    """Yield the comparison of two shards as tasks; the tensors are views of the mapped files."""
    with safe_open(base, framework="pt") as base_file, safe_open(merged, framework="pt") as merged_file:
        for name in base_file.keys():  # noqa: SIM118 (no mapping)
            weight, found = base_file.get_tensor(name), merged_file.get_tensor(name)
            expected = updates.expected(name, weight)
            if expected is None:
                weight, found = (tensor.reshape(-1).view(torch.uint8) for tensor in (weight, found))
                compare = partial(_compare_bytes, name, merged)
            else:
                if expected.start.shape != weight.shape:
                    raise VlmflowError(f"{updates.path}: its {name} does not match the base's", MERGE_AGAIN)
                weight, found = _matrix(weight), _matrix(found)
                compare = partial(_compare_rows, name, merged, expected)
            rows = max(1, TASK_BYTES // max(1, weight[:1].nbytes))
            # A tensor without numbers is compared too, so that it is counted.
            for first in range(0, max(1, len(weight)), rows):
                yield partial(compare, weight, found, first, min(first + rows, len(weight)))


def _matrix(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as rows; each number of a vector is one row."""
    return tensor.reshape(-1, 1) if tensor.ndim < 2 else tensor.flatten(1)


def _compare_bytes(name: str, file: Path, weight: torch.Tensor, found: torch.Tensor, first: int, last: int) -> Compared:
    if not torch.equal(weight[first:last], found[first:last]):
        raise VlmflowError(
            f"{file}: tensor {name} differs from the base's, though the adapter does not touch it", MERGE_AGAIN
        )
    return Compared(name, last - first)


def _compare_rows(
    name: str, file: Path, expected: Expected, weight: torch.Tensor, found: torch.Tensor, begin: int, end: int
) -> Compared:
    """Compare rows of a touched tensor, block by block."""
    start = _matrix(expected.start)
    step = max(1, BLOCK_ELEMENTS // max(1, weight.shape[1]))
    changed, deviation = 0, 0.0
    for first in range(begin, end, step):
        rows = slice(first, min(first + step, end))
        exact, float32_error = _expected_rows(expected, start, rows)
        off = (found[rows].double() - exact).abs_().sub_(float32_error)
        ulps = off.div_(_ulp(exact, weight.dtype))
        # In this form NaN fails.
        if not (worst := ulps.amax().item()) <= 0.5:
            row, column = divmod(int(torch.nan_to_num(ulps, torch.inf).argmax()), weight.shape[1])
            unmerged = ", as in the base: not merged" if torch.equal(found[rows], weight[rows]) else ""
            is_, should_be = found[rows][row, column].item(), exact[row, column].item()
            raise VlmflowError(
                f"{file}: tensor {name}, row {first + row}, column {column}: is {is_:g}{unmerged}; "
                f"base + adapter is {should_be:g}, {worst:.3g} ulps away",
                MERGE_AGAIN,
            )
        changed += int(torch.count_nonzero(found[rows] != weight[rows]))
        deviation = max(deviation, worst)
    elements = (end - begin) * weight.shape[1]
    return Compared(name, elements * weight.itemsize, elements, changed, deviation)


def _expected_rows(expected: Expected, start: torch.Tensor, rows: slice) -> tuple[torch.Tensor, torch.Tensor | float]:
    """Return rows of the required value in float64, and the allowed float32 error of each number."""
    exact = start[rows].to(torch.float64, copy=True)
    if expected.left is None or expected.right is None or expected.lengths is None:
        return exact, 0.0
    left = expected.left[rows]
    bound = ROUNDING * (expected.right.shape[0] + 4)
    reach = torch.linalg.vector_norm(left, dim=1, keepdim=True) * expected.lengths
    error = reach.mul_(abs(expected.scale)).add_(exact.abs()).mul_(bound)
    exact.addmm_(left, expected.right, alpha=expected.scale)
    if expected.magnitude is not None:
        length = torch.linalg.vector_norm(exact, dim=1, keepdim=True)
        relative = torch.linalg.vector_norm(error, dim=1, keepdim=True) / length + DORA_ROUNDINGS * ROUNDING
        factor = expected.magnitude[rows, None].double() / length
        exact.mul_(factor)
        error.mul_(factor.abs()).add_(exact.abs() * relative)
    return exact, error


def _ulp(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the distance of neighbouring numbers of `dtype` at each float64 value.

    That is the power of two at or below the value, times the type's epsilon; a float64 with its sign and its
    52 bits of fraction cleared is that power (IEEE 754). Below the smallest normal number of `dtype` the
    distance stays the same.
    """
    info = torch.finfo(dtype)
    powers = (values.view(torch.int64) & 0x7FF0_0000_0000_0000).view(torch.float64)
    return powers.mul_(info.eps).clamp_(min=info.tiny * info.eps)
