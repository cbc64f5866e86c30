"""The lock that a killed Snakemake leaves behind, cleared when nobody holds it any more."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vlmflow.core.errors import VlmflowError

LOCK = Path(".snakemake", "vlmflow.lock")
"""The file, in the working directory, of whose flock every main process holds a share."""

_held: list[Any] = []
"""Keeps our own lock file open for the life of the process: the kernel drops the lock with it."""


def clear(workflow: Any) -> None:
    """Remove Snakemake's lock files in the working directory if the process that wrote them is gone.

    Snakemake's own lock is a file, which a SIGKILL leaves. Every main process of this workflow also holds a share
    of an flock, which no process survives: where it can be had alone, the files are stale. Where others hold their
    shares, the files are left, and Snakemake says that the directory is locked.
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
    """Keep the working directory to ourselves: a Snakemake that is called meanwhile waits for the end of the block.

    Raises VlmflowError where one is at work, and where the volume has no locks by which to tell.
    """
    LOCK.parent.mkdir(exist_ok=True)
    with LOCK.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise VlmflowError(f"{Path.cwd()}: Snakemake is running here", "wait for it to end, or stop it") from None
        except OSError as error:
            raise VlmflowError(
                f"{LOCK.absolute()}: this volume has no file locks ({error}), so the workflow cannot know whether "
                "Snakemake is "
                "running here",
                "delete what you no longer need by hand: docs/outputs.md",
            ) from None
        yield


def is_held() -> bool:
    """Tell whether a main process is at work in the working directory; for a dry run, which holds no share itself."""
    try:
        with LOCK.open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no run was here yet, or the volume has no flock
        pass
    return False
