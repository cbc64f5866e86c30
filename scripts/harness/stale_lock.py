"""The lock that a killed Snakemake leaves behind, cleared when nobody holds it any more."""

import fcntl
from pathlib import Path
from typing import Any

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
    folder = Path(".snakemake")
    folder.mkdir(exist_ok=True)
    lock = (folder / "vlmflow.lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for stale in (folder / "locks").glob("*.lock"):
            stale.unlink(missing_ok=True)
    except BlockingIOError:
        pass
    fcntl.flock(lock, fcntl.LOCK_SH)
    _held.append(lock)
