"""Brings what was trained into the weights of the base model, shard by shard: an adapter, or trained weights.

The merged folder has the base's layout: the same files, the same header in each shard, each tensor at the same offset.
The kernel copies untouched bytes. Touched tensors pass through memory in blocks of rows, which threads share, so memory
does not grow with the model. A block is one matrix product of a fixed shape on one thread, so the bytes do not depend
on the number of cores.
"""

import errno
import logging
import os
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import require_free_disk, sync, whole_folder
from vlmflow.core.progress import Progress
from vlmflow.fetch.model_weights import WHOLE_AGAIN, ModelWeights, TensorEntry, read_model_weights
from vlmflow.merging.plan import Update, plan_updates
from vlmflow.merging.tensors import FLOAT_TYPES, run_in_order
from vlmflow.merging.trained import Adapter, Trained, TrainedModel, read_trained
from vlmflow.supervisor.report import PlannedMerge

BLOCK_ELEMENTS = 1 << 19
"""Elements in one step of the arithmetic: 2 MB in float32, which fits into a core's cache."""

TASK_BYTES = 1 << 25
"""Bytes of the base per task: small compared with a shard, large compared with the cost of a task."""

FACTORS_KEPT = 4
"""Tensors of an adapter that stay in memory: the factors that all experts of a layer share, of two parameters."""

KERNEL_CANNOT_COPY = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)

SAMPLED_TENSORS = 16
SAMPLED_ROWS = 64
"""Limits of the sample of weights that measures rounding: it is enough for a median, and a GPU waits meanwhile."""

VISIBLE = 0.75
"""The share of the update that rounding must keep; below it, the merged model's logits may not show the adapter."""

log = logging.getLogger(__name__)


Task = Callable[[], int]
"""Writes some bytes of a file and returns their number."""


def merge_weights(base: Path, released: Path, merged: Path, files: Collection[str], threads: int) -> None:
    """Write base + adapter, or the trained weights, to the folder `merged`, which appears complete or not at all.

    base: the base model's folder. files: the names of the model's files in it.
    released: the folder with the files that a training releases (`supervisor.report`).
    threads: the number of cores to use.

    A touched tensor is computed in float32 and rounded once, to the base's type.

    Raises VlmflowError if an input is damaged, they do not fit, the adapter is of a kind that cannot be merged, a
    merged number is not finite, or the disk is too small.
    """
    weights = read_model_weights(base, files)
    trained = read_trained(released)
    updates = _planned_updates(weights, trained)
    for name in weights.left_out:
        log.info("%s: left out, because it would still hold the unmerged weights", base / name)
    log.info("the training touches %d of %d tensors", len(updates), len(weights.tensors()))
    sizes = {name: (base / name).stat().st_size for name in [*weights.others, *weights.shards]}
    total = sum(sizes.values())
    with (
        whole_folder(merged) as folder,
        ExitStack() as sources,
        ThreadPoolExecutor(1) as syncer,
        Progress(f"merge {merged}", total, "bytes") as progress,
    ):
        require_free_disk(folder, total, "the merged model")
        replacing = {trained.tensors[update.replacement][0] for update in updates.values() if update.replacement}
        descriptors = {path: sources.enter_context(path.open("rb")).fileno() for path in replacing}
        synced = []
        for name, size in sizes.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            tensors = weights.shards[name].tensors.values() if name in weights.shards else ()
            with (base / name).open("rb") as source, (folder / name).open("xb") as target:
                opened = OpenFiles(source.fileno(), descriptors, target.fileno())
                for count in run_in_order(_tasks(opened, size, tensors, trained, updates), threads):
                    progress.advance(count)
            # The disk writes this file while the next one is computed.
            synced.append(syncer.submit(sync, folder / name))
        for future in synced:
            future.result()


def _planned_updates(weights: ModelWeights, trained: Adapter | TrainedModel) -> dict[str, Update]:
    """Return the update of every tensor of the base that the training changes, as `plan_updates` does."""
    experts = {}
    if isinstance(trained, Adapter) and (targets := trained.config.target_parameters):
        from vlmflow.merging.experts import expert_layers  # transformers takes seconds, and few adapters need it

        experts = expert_layers(weights, targets)
    return plan_updates(weights, trained, experts)


@dataclass(frozen=True)
class OpenFiles:
    """The file descriptors that a task reads and writes at given offsets; trained: of files that replace tensors."""

    base: int
    trained: Mapping[Path, int]
    merged: int


class Terms(NamedTuple):
    """An update's tensors in memory, as `Update` names them; shapes as in `load_factors`."""

    left: torch.Tensor | None
    right: torch.Tensor | None
    magnitude: torch.Tensor | None


def _tasks(
    files: OpenFiles, size: int, tensors: Iterable[TensorEntry], trained: Trained, updates: Mapping[str, Update]
) -> Iterator[Task]:
    """Yield the work on one file as tasks, in the order of its bytes. tensors: its own, in that order."""
    copied = 0
    load = lru_cache(maxsize=FACTORS_KEPT)(partial(load_finite, trained))
    for entry in tensors:
        if update := updates.get(entry.name):
            yield from _copies(files, copied, entry.begin)
            copied = entry.end
            for matrix, own in of_each_matrix(entry, update):
                yield from _tensor_tasks(files, matrix, own, trained, load)
    yield from _copies(files, copied, size)


def _copies(files: OpenFiles, begin: int, end: int) -> Iterator[Task]:
    for first in range(begin, end, TASK_BYTES):
        last = min(first + TASK_BYTES, end)
        _read_ahead(files, first, last)
        yield partial(_copy_bytes, files, first, last)


def _read_ahead(files: OpenFiles, begin: int, end: int) -> None:
    # To the kernel, several threads on one file look like random reads; so announce the next range.
    os.posix_fadvise(files.base, begin, end - begin, os.POSIX_FADV_WILLNEED)


def _copy_bytes(files: OpenFiles, begin: int, end: int) -> int:
    """Copy bytes to the same offset, in the kernel if possible (on some file systems without copying)."""
    position = begin
    while position < end:
        try:
            count = os.copy_file_range(files.base, files.merged, end - position, position, position)
        except OSError as error:
            if error.errno not in KERNEL_CANNOT_COPY:
                raise
            count = os.pwrite(files.merged, os.pread(files.base, end - position, position), position)
        if count == 0:
            raise VlmflowError(f"a file of the base became shorter than {end:,} bytes during reading", WHOLE_AGAIN)
        position += count
    return end - begin


def of_each_matrix(entry: TensorEntry, update: Update) -> Iterator[tuple[TensorEntry, Update]]:
    """Yield a tensor with its update; of one that has the matrices of all experts, each matrix with its own."""
    if not (piece := update.piece) or piece.expert is not None:
        yield entry, update
        return
    size = (entry.end - entry.begin) // piece.experts
    for expert in range(piece.experts):
        begin = entry.begin + expert * size
        matrix = TensorEntry(entry.name, entry.dtype, entry.shape[1:], begin, begin + size)
        yield matrix, replace(update, piece=msgspec.structs.replace(piece, expert=expert))


def _tensor_tasks(
    files: OpenFiles, entry: TensorEntry, update: Update, trained: Trained, load: Callable[[str], torch.Tensor]
) -> Iterator[Task]:
    source, start = files.base, entry
    if update.replacement:
        path, start = trained.tensors[update.replacement]
        source = files.trained[path]
    left, right = load_factors(load, update) if update.factors else (None, None)
    terms = Terms(left, right, load(update.magnitude) if update.magnitude else None)
    row_bytes = entry.columns * FLOAT_TYPES[entry.dtype].itemsize
    rows = max(1, TASK_BYTES // max(1, row_bytes))
    for first in range(0, entry.rows, rows):
        last = min(first + rows, entry.rows)
        _read_ahead(files, entry.begin + first * row_bytes, entry.begin + last * row_bytes)
        yield partial(_merge_rows, source, start, update, terms, files.merged, entry, range(first, last))


def load_factors(load: Callable[[str], torch.Tensor], update: Update) -> tuple[torch.Tensor, torch.Tensor]:
    """Return left (rows by r) and right (r by columns), contiguous and in float32, for W (rows by columns).

    load: returns a tensor of the adapter, as `load_finite` does. The update is that of one matrix (`of_each_matrix`).
    """
    a, b = (load(name) for name in update.factors or ())
    if (piece := update.piece) and piece.expert is not None:
        rank = len(a) // piece.experts
        a = a[piece.expert * rank :][:rank]
        b = b[piece.first : piece.last, piece.expert :: piece.experts]
    left, right = (a.T, b.T) if update.transposed else (b, a)
    return left.contiguous(), right.contiguous()


def load_finite(adapter: Trained, name: str) -> torch.Tensor:
    """Load one tensor of the adapter in float32.

    Raises VlmflowError with the tensor's name if a number is not finite.
    """
    path, entry = adapter.tensors[name]
    tensor = first_rows(path, entry, entry.rows).view(entry.shape).float()
    if not torch.isfinite(tensor).all():
        raise VlmflowError(f"{path}: tensor {name} holds NaN or infinity", "train the adapter again")
    return tensor


def _merge_rows(
    source: int, start: TensorEntry, update: Update, terms: Terms, target: int, entry: TensorEntry, rows: range
) -> int:
    """Write rows of a touched tensor; returns the number of bytes written.

    source, target: descriptors of files. start, entry: where the tensor is there.
    """
    dtype = FLOAT_TYPES[entry.dtype]
    step = min(len(rows), max(1, BLOCK_ELEMENTS // max(1, entry.columns)))
    # One set of buffers per task, so that the kernel does not have to allocate memory for every block.
    all_read = torch.empty((step, entry.columns), dtype=FLOAT_TYPES[start.dtype])
    all_values = torch.empty((step, entry.columns))
    all_merged = torch.empty((step, entry.columns), dtype=dtype)
    for first in rows[::step]:
        last = min(first + step, rows.stop)
        read, values, merged = (buffer[: last - first] for buffer in (all_read, all_values, all_merged))
        read_rows(source, start, first, read)
        values.copy_(as_in_base(read, start, update.swaps))
        if terms.left is not None:
            values.addmm_(terms.left[first:last], terms.right, alpha=update.scale)
        if terms.magnitude is not None:
            # In float64, because a float32 sum over thousands of elements would lose its last bits.
            length = torch.linalg.vector_norm(values, dim=1, dtype=torch.float64)
            values.mul_((terms.magnitude[first:last] / length).float().unsqueeze(1))
        merged.copy_(values)
        # The sum is a fast check; large finite numbers may also fail it.
        if not torch.isfinite(merged.sum()) and not torch.isfinite(merged).all():
            raise VlmflowError(
                f"tensor {entry.name}, rows {first} to {last - 1}: a merged value is NaN or too large "
                f"for {entry.dtype}",
                "check the training's losses, and train again with a lower learning rate",
            )
        write_rows(target, entry, first, merged)
    return len(rows) * entry.columns * int(dtype.itemsize)


def as_in_base(rows: torch.Tensor, entry: TensorEntry, swaps: bool) -> torch.Tensor:
    """Return rows of a checkpoint's tensor, which stands at `entry`, in the base's layout. swaps: see `Update`."""
    return rows.view(-1, *entry.shape[1:]).mT.flatten(1) if swaps else rows


def read_rows(descriptor: int, entry: TensorEntry, first: int, rows: torch.Tensor) -> None:
    """Fill `rows`, contiguous and of the tensor's own type, with the tensor's rows from number `first` on.

    Raises VlmflowError if the file ends too early.
    """
    offset = entry.begin + first * entry.columns * rows.itemsize
    view = _bytes_of(rows)
    while view:
        count = os.preadv(descriptor, [view], offset)
        if count == 0:
            raise VlmflowError(f"tensor {entry.name}: its file became shorter during reading", WHOLE_AGAIN)
        view, offset = view[count:], offset + count


def write_rows(descriptor: int, entry: TensorEntry, first: int, rows: torch.Tensor) -> None:
    """Overwrite the tensor's rows from number `first` on with `rows`, contiguous and of the tensor's own type."""
    offset = entry.begin + first * entry.columns * rows.itemsize
    view = _bytes_of(rows)
    while view:
        count = os.pwrite(descriptor, view, offset)
        view, offset = view[count:], offset + count


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())


def planned_merge(base: Path, released: Path, files: Collection[str]) -> PlannedMerge:
    """Return what a merge would change, and how much of the update rounding would keep.

    The parameters are those of `merge_weights`. Raises as it does, but for numbers and the disk.
    """
    weights = read_model_weights(base, files)
    trained = read_trained(released)
    updates, tensors = _planned_updates(weights, trained), weights.tensors()
    is_model = isinstance(trained, TrainedModel)
    plain = sorted(name for name, update in updates.items() if not update.magnitude and (is_model or update.factors))
    paths = {name: shard.path for shard in weights.shards.values() for name in shard.tensors}
    sample = plain[:: max(1, len(plain) // SAMPLED_TENSORS)]
    shares = [_share_kept(paths[name], tensors[name], updates[name], trained) for name in sample]
    known = [share for share in shares if share is not None]
    rounding_leaves = round(statistics.median(known), 3) if known else None
    layers = Counter(name.rpartition(".")[0].rpartition(".")[2] for name in updates)
    return PlannedMerge(
        tensors=len(tensors),
        touched=len(updates),
        layers=dict(sorted(layers.items())),
        rounding_leaves=rounding_leaves,
        logits_may_be_inconclusive=rounding_leaves is not None and rounding_leaves < VISIBLE,
    )


def _share_kept(path: Path, entry: TensorEntry, update: Update, trained: Trained) -> float | None:
    """Return the share of an update that is left, <round(W + s·BA) - W, s·BA> / |s·BA|², in a tensor's first rows.

    After a training of the weights themselves, their change is in the place of s·BA. None if it changed nothing.
    """
    entry, update = next(of_each_matrix(entry, update))
    rows = min(SAMPLED_ROWS if len(entry.shape) < 3 else 1, entry.rows)  # a row of experts is a whole matrix
    stored = first_rows(path, entry, rows)
    if update.factors:
        left, right = load_factors(partial(load_finite, trained), update)
        change = update.scale * left[:rows] @ right
    else:
        replacing, start = trained.tensors[update.replacement or entry.name]
        change = as_in_base(first_rows(replacing, start, rows), start, update.swaps).float() - stored.float()
    kept = (stored.float() + change).to(stored.dtype).float() - stored.float()
    squared = change.double().square().sum().item()
    return (kept.double() * change).sum().item() / squared if squared else None


def first_rows(path: Path, entry: TensorEntry, rows: int) -> torch.Tensor:
    """Return the first rows of a tensor, as a matrix in its own type."""
    stored = torch.empty((rows, entry.columns), dtype=FLOAT_TYPES[entry.dtype])
    with path.open("rb") as source:
        read_rows(source.fileno(), entry, 0, stored)
    return stored
