"""Gives each job of this machine GPUs of its own: Snakemake counts GPUs, and every program takes the first ones.

A GPU is held by a lock on a file, so also among several calls of Snakemake by one user, until the stage's process ends.
In a pod the node has already chosen them. So has Slurm: a stage in a job of its own asks for no lock. In each job the
first GPU has the number 0, so one job's locks are not another's.
"""

import fcntl
import logging
import os
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from vlmflow.core.errors import VlmflowError
from vlmflow.harness.place import IN_SLURM

VISIBLE = "CUDA_VISIBLE_DEVICES"

PAUSE = 1.0
"""Seconds between two looks for a free GPU."""

_held: list[int] = []
"""The open files of the locks: they go with the process."""


def take(count: int) -> None:
    """Choose `count` free GPUs for this process and its children, through CUDA_VISIBLE_DEVICES.

    It waits for them as long as others hold them. It holds all that this process may use if that is no more than
    `count`, and then names none.
    """
    names = gpus() if count and IN_SLURM not in os.environ else []
    if not 0 < count <= len(names):
        return  # too few are refused before the first job, or by the stage
    folder, said = _folder(), False
    while len(taken := _locked(folder, names, count)) < count:
        if not said:
            logging.getLogger("vlmflow").info(f"waiting for {count} of {len(names)} GPUs: others of you use them")
            said = True
        time.sleep(PAUSE)
    if count < len(names):
        if VISIBLE not in os.environ:
            os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # the names are the driver's numbers
        os.environ[VISIBLE] = ",".join(taken)


def gpus() -> list[str]:
    """Return the GPUs that this process may use: those of CUDA_VISIBLE_DEVICES, or the driver's numbers of all."""
    if (given := os.environ.get(VISIBLE)) is not None:
        return given.split(",") if given else []
    try:
        listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return []  # the stage itself shows what is wrong with the driver
    return [str(number) for number in range(sum(line.startswith("GPU ") for line in listed.stdout.splitlines()))]


def _locked(folder: Path, names: list[str], count: int) -> dict[str, int]:
    """Lock so many GPUs, or none; returns their files by name."""
    found: dict[str, int] = {}
    for name in names:
        file = os.open(folder / name.replace("/", "_"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found[name] = file
        except BlockingIOError:
            os.close(file)
        if len(found) == count:
            _held.extend(found.values())
            return found
    for file in found.values():
        os.close(file)
    return {}


def _folder() -> Path:
    """Return the folder of this machine's locks, which is this user's alone; TMPDIR may be on a disk that others share.

    Raises VlmflowError if another user made it.
    """
    job = f"-{number}" if (number := os.environ.get("SLURM_JOB_ID", "")).isdigit() else ""
    folder = Path(tempfile.gettempdir(), f"vlmflow-gpus-{os.getuid()}-{socket.gethostname()}{job}")
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise VlmflowError(f"{folder}: belongs to another user", "remove it, or set TMPDIR to a folder of your own")
    return folder
