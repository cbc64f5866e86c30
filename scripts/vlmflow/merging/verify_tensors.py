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

Most numbers are nearer to the sum than the worst one before, whatever float32 may add. One comparison of integers shows
that; only the other numbers' deviations are computed.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from vlmflow.config.strategies import LORA, Tuner
from vlmflow.core.errors import VlmflowError
from vlmflow.core.progress import Progress
from vlmflow.merging.expected_tensors import Expected, TrainedWeights, Updates
from vlmflow.merging.proof import MERGE_AGAIN, ChangedTensors, TensorProof, verify_files
from vlmflow.merging.tensors import FLOAT_TYPES, run_in_order
from vlmflow.swift.model_layers import starred

BLOCK_ELEMENTS = 1 << 18
"""Elements compared in one step: 2 MB in float64. With smaller steps, threads wait for the interpreter's lock; larger
ones leave a core's cache."""

BLOCK_BYTES = 1 << 20
"""Bytes of an untouched tensor that are compared in one step."""

TASK_BYTES = 1 << 25

ROUNDING = 2.0**-24
"""The relative error of one float32 operation: half the distance between 1 and the next number."""

DORA_ROUNDINGS = 3
"""Length, quotient and product of magnitude ⊙ V / ‖V‖."""


Errors = tuple[torch.Tensor, ...]
"""The error of float32 that a block's numbers may have: own · |start| + reach · lengths + relative · |value|.

own, reach, relative: a number per row. lengths: one per column. Empty if there is none.
"""

Places = tuple[slice | torch.Tensor, ...]
"""Numbers of a block: their rows and their columns."""

ALL: Places = (slice(None), slice(None))


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
    released: the folder with the files that a training with `tuner` releases (`supervisor.report`).
    threads: the number of cores to use.

    Raises VlmflowError with file and tensor at the first fault: a missing, new or changed file, a shard with another
    layout, a tensor with a wrong value, a tensor of the adapter without a place.
    """
    shards = verify_files(base, merged, files)
    total = sum((base / name).stat().st_size for name in shards)
    updates = Updates(released, base, _names(base, shards)) if tuner.trains_adapter else TrainedWeights(released)
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


def _names(base: Path, shards: Iterable[str]) -> list[str]:
    names: list[str] = []
    for shard in shards:
        with safe_open(base / shard, framework="pt") as file:
            names += file.keys()
    return names


def _kinds(names: dict[str, bool], numbers: Counter[str], changed: Counter[str]) -> list[ChangedTensors]:
    """Join the touched tensors whose names differ only in numbers. names: whether each tensor is touched."""
    kinds: dict[str, list[str]] = {}
    for name, touched in names.items():
        if touched:
            kinds.setdefault(starred(name), []).append(name)
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
            weight, saved = base_file.get_tensor(name), merged_file.get_tensor(name)
            expected = updates.expected(name, weight)
            if expected is None:
                weight, saved = (tensor.reshape(-1).view(torch.uint8) for tensor in (weight, saved))
                compare = partial(_compare_bytes, name, merged)
            else:
                types = {weight.dtype, expected.start.dtype}
                if expected.start.shape != weight.shape or not types.issubset(FLOAT_TYPES.values()):
                    raise VlmflowError(f"{updates.path}: its {name} does not match the base's", MERGE_AGAIN)
                if expected.matrices:
                    for expert, matrix in enumerate(expected.matrices):
                        compare = partial(_compare_rows, name, f"{name}[{expert}]", merged, matrix)
                        yield from _tasks(compare, weight[expert], saved[expert])
                    continue
                weight, saved = _matrix(weight), _matrix(saved)
                compare = partial(_compare_rows, name, name, merged, expected)
            yield from _tasks(compare, weight, saved)


def _tasks(
    compare: Callable[[torch.Tensor, torch.Tensor, range], Compared], weight: torch.Tensor, saved: torch.Tensor
) -> Iterator[Task]:
    rows = max(1, TASK_BYTES // max(1, weight[:1].nbytes))
    # A tensor without numbers is compared too, so that it is counted.
    for first in range(0, max(1, len(weight)), rows):
        yield partial(compare, weight, saved, range(first, min(first + rows, len(weight))))


def _matrix(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as rows; each number of a vector is one row."""
    return tensor.reshape(-1, 1) if tensor.ndim < 2 else tensor.flatten(1)


def _compare_bytes(name: str, file: Path, weight: torch.Tensor, saved: torch.Tensor, part: range) -> Compared:
    expected, is_ = weight.numpy(), saved.numpy()  # torch compares bytes ten times as slowly
    for begin in part[::BLOCK_BYTES]:
        block = slice(begin, min(begin + BLOCK_BYTES, part.stop))
        if not np.array_equal(expected[block], is_[block]):
            raise VlmflowError(
                f"{file}: tensor {name} differs from the base's, though the adapter does not touch it", MERGE_AGAIN
            )
    return Compared(name, len(part))


def _compare_rows(
    name: str, shown: str, file: Path, expected: Expected, weight: torch.Tensor, saved: torch.Tensor, part: range
) -> Compared:
    """Compare rows of a touched tensor, block by block. shown: its name for people, with the number of the matrix."""
    start, columns = _matrix(expected.start), weight.shape[1]
    step = min(len(part), max(1, BLOCK_ELEMENTS // max(1, columns)))
    # One set of buffers per task, so that the kernel does not have to allocate memory for every block.
    sums = torch.empty((step, columns), dtype=torch.float64)
    buffers = torch.empty((2, step, columns))
    changed, worst = 0, 0.0
    for first in part[::step]:
        rows = slice(first, min(first + step, part.stop))
        exact, rounded, wide = (buffer[: rows.stop - first] for buffer in (sums, *buffers))
        errors = _fill_with_sums(exact, expected, start[rows], rows)
        at = _further_than(worst, weight.dtype, rounded.copy_(exact), wide.copy_(saved[rows]), is_sum=bool(errors))
        changed += int(rounded.copy_(weight[rows]).ne_(wide).sum())
        ulps = _ulps_off(exact, saved[rows], start[rows], errors, at)
        if not ulps.numel():
            continue
        # In this form NaN fails.
        if not (furthest := ulps.amax().item()) <= 0.5:
            ulps = _ulps_off(exact, saved[rows], start[rows], errors, ALL)
            row, column = divmod(int(torch.nan_to_num(ulps, torch.inf).argmax()), columns)
            unmerged = ", as in the base: not merged" if torch.equal(saved[rows], weight[rows]) else ""
            is_, should_be = saved[rows][row, column].item(), exact[row, column].item()
            raise VlmflowError(
                f"{file}: tensor {shown}, row {first + row}, column {column}: is {is_:g}{unmerged}; "
                f"base + adapter is {should_be:g}, {furthest:.3g} ulps away",
                MERGE_AGAIN,
            )
        worst = max(worst, furthest)
    elements = len(part) * columns
    return Compared(name, elements * weight.itemsize, elements, changed, worst)


def _fill_with_sums(exact: torch.Tensor, expected: Expected, start: torch.Tensor, rows: slice) -> Errors:
    """Fill `exact` with rows of the required value; return what float32 may add to their errors.

    exact: in float64. start: these rows of `expected.start`.
    """
    exact.copy_(start)
    if expected.left is None or expected.right is None or expected.lengths is None:
        return ()
    left = expected.left[rows]
    bound = ROUNDING * (expected.right.shape[0] + 4)
    own = torch.full((len(left), 1), bound, dtype=torch.float64)
    reach = torch.linalg.vector_norm(left, dim=1, keepdim=True) * (abs(expected.scale) * bound)
    if expected.magnitude is None:
        exact.addmm_(left, expected.right, alpha=expected.scale)
        return own, reach, expected.lengths, torch.zeros_like(own)
    error = torch.linalg.vector_norm(exact.abs().mul_(bound).addmm_(reach, expected.lengths[None]), dim=1, keepdim=True)
    exact.addmm_(left, expected.right, alpha=expected.scale)
    length = torch.linalg.vector_norm(exact, dim=1, keepdim=True)
    factor = expected.magnitude[rows, None].double() / length
    exact.mul_(factor)
    return own * factor.abs(), reach * factor.abs(), expected.lengths, error / length + DORA_ROUNDINGS * ROUNDING


def _further_than(
    ulps: float, dtype: torch.dtype, values: torch.Tensor, saved: torch.Tensor, *, is_sum: bool
) -> Places:
    """Return places with all numbers of a block that are further from the required value than `ulps` of `dtype`.

    values: the required ones in float32, which are changed. is_sum: whether they were rounded to it.
    saved: numbers of `dtype` in float32.

    Read as integers, float32's numbers of one sign are counted in their order (IEEE 754), so the difference of two is
    the number of steps between them. It is enough to count steps: only beyond a power of two are they longer than at
    the value, and there `saved` is a whole ulp away from that power. Two signs make the highest bits differ.
    """
    limit = int(ulps * torch.finfo(dtype).eps / (2 * ROUNDING)) - is_sum  # rounding hides half a step at most
    # The sum is a fast check for NaN and infinity; large finite numbers may also fail it.
    if limit < 0 or not torch.isfinite(saved.sum()):
        return ALL
    steps = values.view(torch.int32).sub_(saved.view(torch.int32)).add_(limit)
    far = np.flatnonzero(steps.numpy().view(np.uint32) > 2 * limit)  # unsigned, so that -limit to limit are near
    return tuple(torch.from_numpy(index) for index in np.divmod(far, values.shape[1]))


def _ulps_off(
    exact: torch.Tensor, saved: torch.Tensor, start: torch.Tensor, errors: Errors, places: Places
) -> torch.Tensor:
    """Return how many ulps the numbers in `places` are from the required value, beyond the error of float32."""
    sums = exact[places]
    off = (saved[places].double() - sums).abs_()
    if errors:
        own, reach, lengths, relative = (term.expand_as(exact)[places] for term in errors)
        off -= start[places].double().abs_().mul_(own).addcmul_(reach, lengths).addcmul_(sums.abs(), relative)
    return off.div_(_ulp(sums, saved.dtype))


def _ulp(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the distance of neighbouring numbers of `dtype` at each float64 value.

    That is the power of two at or below the value, times the type's epsilon; a float64 with its sign and its
    52 bits of fraction cleared is that power (IEEE 754). Below the smallest normal number of `dtype` the
    distance stays the same.
    """
    info = torch.finfo(dtype)
    powers = (values.view(torch.int64) & 0x7FF0_0000_0000_0000).view(torch.float64)
    return powers.mul_(info.eps).clamp_(min=info.tiny * info.eps)
