"""Work that waits for the wire and for the disk, done by several threads."""

import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

Part = TypeVar("Part")


def side_by_side(
    parts: Iterable[Part], work: Callable[[Part], object], threads: int, stop: Callable[[], object]
) -> None:
    """Call `work(part)` for every part, so many at a time.

    stop: makes the work that is under way end early; called where a part of it fails.

    Raises what was raised first.
    """
    left = iter(list(parts))  # one call takes from a list's iterator, so that threads can share it
    errors: list[BaseException] = []

    def fail(error: BaseException) -> None:
        errors.append(error)
        stop()

    def work_on() -> None:
        try:
            for part in left:
                if errors:
                    return
                work(part)
        except BaseException as error:
            fail(error)

    workers = [threading.Thread(target=work_on, daemon=True) for _ in range(threads)]
    for worker in workers:
        worker.start()
    try:
        for worker in workers:
            worker.join()
    except BaseException as interruption:  # in this thread: nobody waits for the others any more
        fail(interruption)
        raise
    if errors:
        raise errors[0]
