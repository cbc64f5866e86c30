"""Reads and writes the tensors of a safetensors file, as their own bytes.

Runs tensor work in threads: reading and arithmetic release the interpreter's lock.

The names that a model's tensors have in memory, where transformers renames them as it loads them.

An adapter has the names in memory, the base those of its files. The merge finds one by the rules of loading; the proof
of its result by those of saving, so that it does not repeat an error.
"""

import os
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers.core_model_loading import revert_weight_conversion

from vlmflow.core.errors import VlmflowError
from vlmflow.fetch.model_weights import WHOLE_AGAIN, SafetensorsFile, TensorEntry
from vlmflow.swift.child_process import limited
from vlmflow.swift.meta_model import Loading, meta_model

FLOAT_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""The types of weights that are trained and merged, by the format's names."""


def read_tensor(file: SafetensorsFile, name: str) -> torch.Tensor:
    """Read one tensor of the types in FLOAT_TYPES, in its own type and shape."""
    entry = file.tensors[name]
    tensor = torch.empty(entry.shape, dtype=FLOAT_TYPES[entry.dtype])
    with file.path.open("rb") as source:
        read_rows(source.fileno(), entry, 0, tensor)
    return tensor


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


Result = TypeVar("Result")

WAITING_PER_THREAD = 2
"""Tasks submitted ahead of the one whose result is awaited; bounds memory."""


def run_in_order(tasks: Iterable[Callable[[], Result]], threads: int) -> Iterator[Result]:
    """Yield the result of every task, in the order of the tasks, computed by `threads` threads.

    Within a task torch uses one core, so a result does not depend on the number of cores.

    Raises a task's exception after the running tasks have ended; the others are not started.
    """
    waiting: deque[Future[Result]] = deque()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with ThreadPoolExecutor(threads) as pool:
        try:
            for task in tasks:
                waiting.append(pool.submit(task))
                if len(waiting) > threads * WAITING_PER_THREAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)
            torch.set_num_threads(before)


def loaded_as(base: Path, names: Collection[str]) -> dict[str, str]:
    """Return the name in memory of every tensor of a model that is loaded as it is, by its name in the files.

    base: the model's folder. names: those of all its tensors. Returns {} if transformers cannot build the model.
    """
    found: dict[str, str] = limited(partial(_loaded_as, base, names)).get("names", {})
    return found


def saved_as(base: Path) -> dict[str, str]:
    """Return the same by the names under which transformers would save the model."""
    found: dict[str, str] = limited(partial(_saved_as, base)).get("names", {})
    return found


def _loaded_as(base: Path, names: Collection[str]) -> dict[str, Any]:
    model = meta_model(base)
    if model is None:
        return {}
    loading = Loading(model, model.state_dict())
    places = {name: loading.place(name) for name in names if not loading.converts([name])}
    filled = Counter(places.values())
    return {"names": {name: place for name, place in places.items() if filled[place] == 1}}


def _saved_as(base: Path) -> dict[str, Any]:
    model = meta_model(base)
    if model is None:
        return {}
    saved = {name: list(revert_weight_conversion(model, {name: weight})) for name, weight in model.state_dict().items()}
    return {"names": {names[0]: name for name, names in saved.items() if len(names) == 1}}
