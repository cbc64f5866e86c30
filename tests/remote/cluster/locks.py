"""Locks: all processes of the user share the builds in the cache folder, and the cluster itself."""

import contextlib
import fcntl
from collections.abc import Iterator

from cluster.paths import CACHE


@contextlib.contextmanager
def alone(what: str) -> Iterator[None]:
    """Wait for the lock `what` and hold it; a process that dies releases it."""
    locks = CACHE / "locks"
    locks.mkdir(parents=True, exist_ok=True)
    with (locks / what).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
