"""Brings what was trained into the weights of the base model, shard by shard: an adapter, or trained weights.

The merged folder has the base's layout: the same files, the same header in each shard, each tensor at the same offset.
The kernel copies untouched bytes. Touched tensors pass through memory in blocks of rows, which threads share, so memory
does not grow with the model. A block is one matrix product of a fixed shape on one thread, so the bytes do not depend
on the number of cores.
"""

import errno
import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import torch

from vlmflow.config.strategies import LORA, Tuner
from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import require_free_disk, sync, whole_folder
from vlmflow.core.progress import Progress
from vlmflow.fetch.model_weights import WHOLE_AGAIN, SafetensorsFile, TensorEntry
from vlmflow.merging.adapter import Adapter, Update, load_factors, load_finite, of_each_matrix
from vlmflow.merging.tensors import FLOAT_TYPES, read_rows, run_in_order, write_rows
from vlmflow.merging.updates import TrainedModel, as_in_base, plan_merge

BLOCK_ELEMENTS = 1 << 19
"""Elements in one step of the arithmetic: 2 MB in float32, which fits into a core's cache."""

TASK_BYTES = 1 << 25
"""Bytes of the base per task: small compared with a shard, large compared with the cost of a task."""

FACTORS_KEPT = 4
"""Tensors of an adapter that stay in memory: the factors that all experts of a layer share, of two parameters."""

KERNEL_CANNOT_COPY = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)

log = logging.getLogger(__name__)


def merge_weights(
    base: Path, released: Path, merged: Path, files: Collection[str], threads: int, tuner: Tuner = LORA
) -> None:
    """Write base + adapter, or the trained weights, to the folder `merged`, which appears complete or not at all.

    base: the base model's folder. files: the names of the model's files in it.
    released: the folder with the files that a training with `tuner` releases (`supervisor.report`).
    threads: the number of cores to use.

    A touched tensor is computed in float32 and rounded once, to the base's type.

    Raises VlmflowError if an input is damaged, they do not fit, the adapter is of a kind that cannot be merged, a
    merged number is not finite, or the disk is too small.
    """
    plan = plan_merge(base, released, files, tuner)
    weights, trained, tensors, updates = plan.weights, plan.trained, plan.tensors, plan.updates
    for name in weights.left_out:
        log.info("%s: left out, because it would still hold the unmerged weights", base / name)
    log.info("the training touches %d of %d tensors", len(updates), len(tensors))
    others = {name: (base / name).stat().st_size for name in weights.others}
    total = sum(others.values()) + sum(shard.size for shard in weights.shards.values())
    with (
        whole_folder(merged) as folder,
        ExitStack() as sources,
        ThreadPoolExecutor(1) as syncer,
        Progress(f"merge {merged}", total, "bytes") as progress,
    ):
        require_free_disk(folder, total, "the merged model")
        places = {trained.place(update.replacement)[0] for update in updates.values() if update.replacement}
        descriptors = {place: sources.enter_context(place.open("rb")).fileno() for place in places}
        synced = []
        for name in [*others, *weights.shards]:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            with (base / name).open("rb") as source, (folder / name).open("xb") as target:
                files_open = OpenFiles(source.fileno(), descriptors, target.fileno())
                if name in others:
                    tasks = _copies(files_open, 0, others[name])
                else:
                    tasks = _shard_tasks(files_open, weights.shards[name], trained, updates)
                for count in run_in_order(tasks, threads):
                    progress.advance(count)
            # The disk writes this file while the next one is computed.
            synced.append(syncer.submit(sync, folder / name))
        for future in synced:
            future.result()


Task = Callable[[], int]
"""Writes some bytes of a file and returns their number."""


@dataclass(frozen=True)
class OpenFiles:
    """The file descriptors that a task reads and writes at given offsets; trained: of files that replace tensors."""

    base: int
    trained: Mapping[Path, int]
    merged: int


@dataclass(frozen=True)
class Terms:
    """An update with its factors in memory; names as in `Update`, shapes as in `load_factors`."""

    left: torch.Tensor | None
    right: torch.Tensor | None
    scale: float
    magnitude: torch.Tensor | None
    replacement: tuple[Path, TensorEntry] | None
    swaps: bool = False


def _shard_tasks(
    files: OpenFiles, shard: SafetensorsFile, trained: Adapter | TrainedModel, updates: dict[str, Update]
) -> Iterator[Task]:
    """Yield the work on one shard as tasks, in the order of its bytes."""
    copied = 0
    load = lru_cache(maxsize=FACTORS_KEPT)(partial(load_finite, trained)) if isinstance(trained, Adapter) else None
    for entry in shard.tensors.values():
        if update := updates.get(entry.name):
            yield from _copies(files, copied, entry.begin)
            copied = entry.end
            for matrix, one in of_each_matrix(entry, update):
                yield from _tensor_tasks(files, matrix, _load_terms(trained, one, load))
    yield from _copies(files, copied, shard.size)


def _tensor_tasks(files: OpenFiles, entry: TensorEntry, terms: Terms) -> Iterator[Task]:
    row_bytes = entry.columns * FLOAT_TYPES[entry.dtype].itemsize
    rows = max(1, TASK_BYTES // max(1, row_bytes))
    for first in range(0, entry.rows, rows):
        last = min(first + rows, entry.rows)
        _read_ahead(files, entry.begin + first * row_bytes, entry.begin + last * row_bytes)
        yield partial(_merge_rows, files, entry, terms, first, last)


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


def _load_terms(trained: Adapter | TrainedModel, update: Update, load: Callable[[str], torch.Tensor] | None) -> Terms:
    """Return an update of one matrix with its factors. load: of an adapter's tensors; None without an adapter."""
    replacement = trained.place(update.replacement) if update.replacement else None
    if load is None:
        return Terms(None, None, 1.0, None, replacement, update.swaps)
    left, right = load_factors(load, update) if update.factors else (None, None)
    magnitude = load(update.magnitude) if update.magnitude else None
    return Terms(left, right, update.scale, magnitude, replacement)


def _merge_rows(files: OpenFiles, entry: TensorEntry, terms: Terms, begin: int, end: int) -> int:
    """Write rows `begin` to `end` of a touched tensor; returns the number of bytes written."""
    dtype = FLOAT_TYPES[entry.dtype]
    step = min(end - begin, max(1, BLOCK_ELEMENTS // max(1, entry.columns)))
    source, start = files.base, entry
    if terms.replacement:
        place, start = terms.replacement
        source = files.trained[place]
    # One set of buffers per task, so that the kernel does not have to allocate memory for every block.
    all_read = torch.empty((step, entry.columns), dtype=FLOAT_TYPES[start.dtype])
    all_values = torch.empty((step, entry.columns))
    all_merged = torch.empty((step, entry.columns), dtype=dtype)
    for first in range(begin, end, step):
        last = min(first + step, end)
        read, values, merged = (buffer[: last - first] for buffer in (all_read, all_values, all_merged))
        read_rows(source, start, first, read)
        values.copy_(as_in_base(read, start, terms.swaps))
        if terms.left is not None:
            values.addmm_(terms.left[first:last], terms.right, alpha=terms.scale)
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
        write_rows(files.merged, entry, first, merged)
    return (end - begin) * entry.columns * int(dtype.itemsize)
