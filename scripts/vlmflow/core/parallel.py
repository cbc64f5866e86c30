"""Spreads work over processes, with results in the order of the work, in bounded memory.

It uses ProcessPoolExecutor without its `map`, which submits all items before it yields the first result (Python 3.14
can limit them), pickles the function, and sends results through a pipe.
"""

import gc
import multiprocessing
import pickle
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import cycle
from mmap import mmap
from typing import Any, TypeVar

from vlmflow.core.errors import PassingError
from vlmflow.core.process import bound_to_this_process

Item = TypeVar("Item")
Result = TypeVar("Result")

WAITING_PER_PROCESS = 4
"""Items submitted per process ahead of the awaited result; this bounds memory."""

SLOT_BYTES = 4 << 20
"""Bytes for one result in the memory that the processes share. The executor's own pipe takes 64 KB at a time, and a
process would wait for its reader instead of working: that took a third of the time of validation."""

_function: Callable[[Any], Any]
_shared: mmap


def ordered_map(function: Callable[[Item], Result], items: Iterable[Item], processes: int) -> Iterator[Result]:
    """Yield `function(item)` for every item, in the order of the items, computed in `processes` processes.

    The processes are forked from this one when the first item arrives. So the function may be any closure, and what it
    holds (a mapped file, a table) is shared, not copied. With one process, everything runs in this one.

    Raises PassingError if a process was killed (usually because memory ran out), and whatever the function raises.
    """
    if processes == 1:
        yield from map(function, items)
        return
    context = multiprocessing.get_context("fork")
    end_with_us = bound_to_this_process()
    places = range(0, processes * WAITING_PER_PROCESS * SLOT_BYTES, SLOT_BYTES)
    waiting: deque[tuple[Future[int | bytes], int]] = deque()
    with (
        mmap(-1, len(places) * SLOT_BYTES) as shared,
        ProcessPoolExecutor(processes, context, _begin_worker, (function, shared, end_with_us)) as pool,
    ):
        try:
            for item, place in zip(items, cycle(places), strict=False):
                waiting.append((pool.submit(_call, item, place), place))
                if len(waiting) == len(places):  # the next item reuses the place of the oldest result
                    yield _result(shared, *waiting.popleft())
            while waiting:
                yield _result(shared, *waiting.popleft())
        except BrokenProcessPool:
            raise PassingError(
                "a worker process was killed from outside; most likely the machine ran out of memory",
                "run again with more memory for the rule (--set-resources RULE:mem_mb=…) or fewer threads "
                "(--set-threads RULE=…)",
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


def _begin_worker(function: Callable[[Item], Result], shared: mmap, end_with_parent: Callable[[], None]) -> None:
    """Keep the function and the shared memory in the worker, which inherits them: they are never pickled."""
    global _function, _shared
    end_with_parent()
    gc.disable()  # items are short-lived, and the objects made from them have no cycles
    _function, _shared = function, shared


def _call(item: Item, place: int) -> int | bytes:
    """Put the result into the shared memory and return its length; if it is too large, return the packed result."""
    packed = pickle.dumps(_function(item), pickle.HIGHEST_PROTOCOL)
    if len(packed) > SLOT_BYTES:
        return packed
    _shared[place : place + len(packed)] = packed
    return len(packed)


def _result(shared: mmap, future: Future[int | bytes], place: int) -> Any:
    given = future.result()
    if isinstance(given, bytes):
        return pickle.loads(given)  # noqa: S301 (our own process packed it)
    with memoryview(shared) as view, view[place : place + given] as packed:
        return pickle.loads(packed)  # noqa: S301
