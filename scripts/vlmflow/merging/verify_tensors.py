"""Verifies, tensor by tensor, that a folder has the base and what was trained, and nothing else.

What was trained is an adapter, or the weights themselves. Those must be the checkpoint's, rounded once to the base's
type; all others must be the base's, in the folder and in the checkpoint too.

It does not use the merge's arithmetic: the safetensors package opens the files, the scale comes from peft's own
configuration, and sums are computed in float64. A touched tensor may deviate from such a sum by

- half an ulp of its type at the sum: the single rounding when it is stored, and
- γ (|W| + |s| ‖b‖ ‖a‖), γ = (r + 4) / 2^24, for a product over r terms that was added in float32: the bound
  of Higham, Accuracy and Stability of Numerical Algorithms, section 3.1, for a sum of r products, with two
  terms more for scale and addition and two of margin; ‖b‖ ‖a‖ bounds the sum of |b| |a| after Cauchy and
  Schwarz. With DoRA the same error enters the row's length, and three more roundings follow.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from vlmflow.config.tuners import LORA, Tuner
from vlmflow.core.errors import VlmflowError
from vlmflow.core.progress import Progress
from vlmflow.merging.expected_tensors import Expected, TrainedWeights, Updates
from vlmflow.merging.proof import ChangedTensors, TensorProof
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
class Compared:
    """The result of comparing some rows of one tensor."""

    tensor: str
    bytes: int
    touched: int = 0
    changed: int = 0
    deviation: float = 0.0


Task = Callable[[], Compared]


def verify_tensors(
    base: Path, released: Path, merged: Path, files: Collection[str], threads: int, tuner: Tuner = LORA
) -> TensorProof:
    """Compare the folder `merged` with base + adapter, or with the trained weights.

    base: the base model's folder. files: the names of the model's files in it.
    released: the folder with the files that a training with `tuner` releases (`training.released`).
    threads: the number of cores to use.

    Raises VlmflowError with file and tensor at the first fault: a missing, new or changed file, a shard with another
    layout, a tensor with a wrong value, a tensor of the adapter without a place.
    """
    shards = verify_files(base, merged, files)
    total = sum((base / name).stat().st_size for name in shards)
    updates = Updates(released) if tuner.trains_adapter else TrainedWeights(released)
    names: dict[str, bool] = {}
    numbers: Counter[str] = Counter()
    changed: Counter[str] = Counter()
    worst = Compared("", 0)
    with Progress(f"verify {merged}", total, "bytes") as progress:
        for name in shards:
            try:
                for result in run_in_order(_shard_tasks(base / name, merged / name, updates), threads):
                    names[result.tensor] = bool(result.touched) or names.get(result.tensor, False)
                    numbers[result.tensor] += result.touched
                    changed[result.tensor] += result.changed
                    worst = max(worst, result, key=lambda compared: compared.deviation)
                    progress.advance(result.bytes)
            except SafetensorError as error:
                raise VlmflowError(f"{merged / name}: {error}", MERGE_AGAIN) from None
    if updates.unused:
        raise VlmflowError(f"{updates.path}: {min(updates.unused)} matches no tensor of the base", MERGE_AGAIN)
    if not tuner.trains_adapter and not changed.total():
        raise VlmflowError(
            f"{merged}: not one of {numbers.total():,} trained numbers differs from the base's",
            "raise runs.NAME.train.learning_rate, or train more steps: every update was rounded away",
        )
    return TensorProof(
        shards=len(shards),
        tensors=len(names),
        touched=sum(names.values()),
        untouched=len(names) - sum(names.values()),
        changed_share=changed.total() / numbers.total() if numbers.total() else 0.0,
        largest_deviation=worst.deviation,
        largest_deviation_tensor=worst.tensor,
        kinds=_kinds(names, numbers, changed),
    )


def _kinds(names: dict[str, bool], numbers: Counter[str], changed: Counter[str]) -> list[ChangedTensors]:
    """Join the touched tensors whose names differ only in numbers. names: whether each tensor is touched."""
    kinds: dict[str, list[str]] = {}
    for name, touched in names.items():
        if touched:
            kinds.setdefault(re.sub(r"(?<=\.)\d+(?=\.)", "*", name), []).append(name)
    return [
        ChangedTensors(
            name=kind,
            tensors=len(tensors),
            numbers=sum(numbers[name] for name in tensors),
            changed_share=sum(changed[name] for name in tensors) / max(1, sum(numbers[name] for name in tensors)),
        )
        for kind, tensors in kinds.items()
    ]


def _shard_tasks(base: Path, merged: Path, updates: Updates | TrainedWeights) -> Iterator[Task]:
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
