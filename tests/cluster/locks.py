"""One at a time: what is built in the cache folder, and the cluster itself, belong to every process of the user."""

import contextlib
import fcntl
from collections.abc import Iterator

from cluster.paths import CACHE


@contextlib.contextmanager
def alone(what: str) -> Iterator[None]:
    """Wait until no other process holds `what`, and hold it; a process that dies lets go of it."""
    locks = CACHE / "locks"
    locks.mkdir(parents=True, exist_ok=True)
    with (locks / what).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
