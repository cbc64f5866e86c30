"""Clears the lock that a killed Snakemake leaves, if nobody holds it any more."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vlmflow.core.errors import VlmflowError

LOCK = Path(".snakemake", "vlmflow.lock")
"""The file, in the working directory, on which every main process holds a shared flock."""

_held: list[Any] = []
"""Keeps our lock file open during the life of the process: the kernel releases the lock with it."""


def clear(workflow: Any) -> None:
    """Remove Snakemake's lock files in the working directory if the process that wrote them is gone.

    Snakemake's own lock is a file, which remains after a SIGKILL. Every main process of this workflow also holds a
    shared flock, which ends with the process: if an exclusive one succeeds, the files are stale. If others hold it, the
    files stay, and Snakemake reports that the directory is locked.
    """
    if not workflow.is_main_process or workflow.dryrun:
        return
    LOCK.parent.mkdir(exist_ok=True)
    lock = LOCK.open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for stale in (LOCK.parent / "locks").glob("*.lock"):
            stale.unlink(missing_ok=True)
    except BlockingIOError:
        pass
    fcntl.flock(lock, fcntl.LOCK_SH)
    _held.append(lock)


@contextmanager
def alone() -> Iterator[None]:
    """Lock the working directory: a Snakemake that is started meanwhile waits for the end of the block.

    Raises VlmflowError if one is running, or if the volume has no file locks.
    """
    LOCK.parent.mkdir(exist_ok=True)
    with LOCK.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise VlmflowError(f"{Path.cwd()}: Snakemake is running here", "wait until it ends, or stop it") from None
        except OSError as error:
            raise VlmflowError(
                f"{LOCK.absolute()}: this volume has no file locks ({error}), so the workflow cannot know whether "
                "Snakemake is running here",
                "delete what you no longer need by hand: docs/outputs.md",
            ) from None
        yield


def is_held() -> bool:
    """Return whether a main process runs in the working directory; for a dry run, which holds no lock itself."""
    try:
        with LOCK.open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # nothing has run here yet, or the volume has no flock
        pass
    return False
