"""What the merge and the proof of its result share: the types of weights, and threads.

Reading and arithmetic release the interpreter's lock, so threads compute side by side.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

FLOAT_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""The types of weights that are trained and merged, by the format's names."""

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
