"""Runs work that waits for network and disk in several threads."""

import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

Item = TypeVar("Item")


def in_threads(items: Iterable[Item], work: Callable[[Item], object], threads: int, stop: Callable[[], object]) -> None:
    """Call `work(item)` for every item, in so many threads.

    stop: makes running work end early; called when an item fails.

    Raises the first exception of an item.
    """
    left = iter(list(items))  # threads can share a list's iterator: taking an item is a single call
    errors: list[BaseException] = []

    def fail(error: BaseException) -> None:
        errors.append(error)
        stop()

    def work_on() -> None:
        try:
            for item in left:
                if errors:
                    return
                work(item)
        except BaseException as error:
            fail(error)

    workers = [threading.Thread(target=work_on, daemon=True) for _ in range(threads)]
    for worker in workers:
        worker.start()
    try:
        for worker in workers:
            worker.join()
    except BaseException as interruption:  # this thread was interrupted, and does not wait for the others any more
        fail(interruption)
        raise
    if errors:
        raise errors[0]
