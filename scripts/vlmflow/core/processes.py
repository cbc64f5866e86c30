"""Work side by side: in processes that end with the one that started them, and in several pods."""

import ctypes
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, suppress
from itertools import cycle, islice, zip_longest
from mmap import mmap
from pathlib import Path
from typing import Any, TypeVar

from vlmflow import SCRIPTS
from vlmflow.core.errors import PassingError, VlmflowError
from vlmflow.core.files import count_lines
from vlmflow.core.progress import Progress

PR_SET_PDEATHSIG = 1
"""prctl(2), Linux: which signal the kernel sends to this process when the thread that started it ends."""


def die_with_parent(parent: int, signal_number: int = signal.SIGKILL) -> None:
    """Ask the kernel to send `signal_number` to this process when `parent` (a process id) ends.

    Call it in the child. If the parent has already ended, the child exits at once.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal_number)
    if os.getppid() != parent:
        sys.exit(f"process {parent}, which started this one, has ended")


def descends_from(ancestor: int) -> bool:
    """Return whether a process (id) is the parent of this one, or one above the parent."""
    process = os.getpid()
    with suppress(FileNotFoundError, ProcessLookupError):  # one of them has just ended
        while process > 1:
            process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
            if process == ancestor:
                return True
    return False


SHELLS = ("sh", "bash", "dash")
"""Snakemake starts a stage through one."""


def tell_stages(to_be_told: Callable[[Any], bool]) -> None:
    """Send SIGTERM to each stage that this Snakemake runs, or starts from now on, once; it never returns.

    to_be_told: whether a stage (a psutil.Process) is told now; each is asked about again until it is.
    """
    import psutil  # only here: most processes tell nobody

    told: set[int] = set()
    while True:
        for child in psutil.Process().children():
            with suppress(psutil.Error):  # it has just ended
                for stage in child.children() if child.name() in SHELLS else [child]:
                    if stage.pid not in told and to_be_told(stage):
                        told.add(stage.pid)
                        stage.send_signal(signal.SIGTERM)
        time.sleep(0.2)


def bound_to_this_process(signal_number: int = signal.SIGKILL) -> Callable[[], None]:
    """Return a function for a child to call at its start (pool initializer, preexec_fn): it then ends with us."""
    parent = os.getpid()

    def bind() -> None:
        # Our handler would take a signal until the child has its own program.
        if signal_number != signal.SIGKILL:
            signal.signal(signal_number, signal.SIG_DFL)
        die_with_parent(parent, signal_number)

    return bind


def import_path() -> str:
    """Return PYTHONPATH for a process of ours in another working directory: our modules, and no relative folder."""
    given = filter(os.path.isabs, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    return os.pathsep.join(dict.fromkeys([str(SCRIPTS), *given]))


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

    Memory is bounded. `ProcessPoolExecutor.map` is not used: it submits all items before it yields the first result
    (Python 3.14 can limit them), pickles the function, and sends results through a pipe.

    The processes are forked from this one when the first item arrives. So the function may be any closure, and what it
    holds (a mapped file, a table) is shared, not copied. With one process, everything runs in this one.

    Raises PassingError if a process was killed (usually because memory ran out), and whatever the function raises.
    """
    if processes == 1:
        yield from map(function, items)
        return
    context = multiprocessing.get_context("fork")
    end_with_us = bound_to_this_process()
    slots = range(0, processes * WAITING_PER_PROCESS * SLOT_BYTES, SLOT_BYTES)
    waiting: deque[tuple[Future[int | bytes], int]] = deque()
    with (
        mmap(-1, len(slots) * SLOT_BYTES) as shared,
        ProcessPoolExecutor(processes, context, _begin_worker, (function, shared, end_with_us)) as pool,
    ):
        try:
            for item, slot in zip(items, cycle(slots), strict=False):
                waiting.append((pool.submit(_call, item, slot), slot))
                if len(waiting) == len(slots):  # the next item reuses the slot of the oldest result
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


def _call(item: Item, slot: int) -> int | bytes:
    """Put the result into the shared memory and return its length; if it is too large, return the packed result."""
    packed = pickle.dumps(_function(item), pickle.HIGHEST_PROTOCOL)
    if len(packed) > SLOT_BYTES:
        return packed
    _shared[slot : slot + len(packed)] = packed
    return len(packed)


def _result(shared: mmap, future: Future[int | bytes], slot: int) -> Any:
    sent = future.result()
    if isinstance(sent, bytes):
        return pickle.loads(sent)  # noqa: S301 (our own process packed it)
    with memoryview(shared) as view, view[slot : slot + sent] as packed:
        return pickle.loads(packed)  # noqa: S301


Part = tuple[int, int]
"""One pod's part of a stage's work: its number, and how many parts there are: (1, 4) to (4, 4).

Each pod takes every N-th item. Neighbouring rows are alike (small photographs here, large scans there), so a contiguous
range would not give each about the same amount of work.
"""

UNDIVIDED: Part = (1, 1)


def items_of(part: Part, items: Iterable[Item]) -> Iterator[Item]:
    """Yield the items of a part: every N-th, from the part's number on."""
    number, parts = part
    return islice(items, number - 1, None, parts)


def joined_lines(files: Sequence[Path]) -> Iterator[bytes]:
    """Yield the lines of all parts' files in the original order; each file has a line per picture of its part.

    Raises VlmflowError if the files are not the parts of one result.
    """
    total = sum(map(count_lines, files))
    with ExitStack() as opened:
        progress = opened.enter_context(Progress(f"joining {files[0]} to {files[-1].name}", total, "pictures"))
        parts = [opened.enter_context(file.open("rb")) for file in files]
        ended = False
        for number, lines in enumerate(zip_longest(*parts), start=1):
            present = [line for line in lines if line is not None]
            if ended or present != list(lines[: len(present)]) or not all(line.endswith(b"\n") for line in present):
                raise VlmflowError(
                    f"{files[0]} to {files[-1].name}, line {number}: these parts do not belong together: "
                    "one is incomplete, or from another run",
                    "remove them and run the same command again",
                )
            ended = len(present) < len(lines)
            yield from present
            progress.advance(len(present))
