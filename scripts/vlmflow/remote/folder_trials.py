"""Tries in folders what stages do there, on the machine of a job.

A pod's Python gets this file as text, and prints what the pod sees of itself, as one line of JSON:
       leave NAME [FOLDER …]   try in each folder what stages do there, and leave a file for another pod
       find NAME [FOLDER …]    look for that file, and remove it
"""

import contextlib
import fcntl
import importlib.metadata
import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

OLD = 3600
"""The age in seconds from which a probe's files are removed: the probe has died."""


def write(folder: Path) -> None:
    """Write a file and flush it to disk."""
    with (folder / "file").open("w") as file:
        file.write("x")
        file.flush()
        os.fsync(file.fileno())


def rename(folder: Path) -> None:
    """Rename a filled folder over an empty one, as targets get their names; sync the parent folder."""
    for name in ("part", "target"):
        (folder / name).mkdir()
    (folder / "part" / "file").write_text("x")
    (folder / "part").rename(folder / "target")
    if not (folder / "target" / "file").exists():
        raise OSError("the renamed folder is empty")
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def symlink(folder: Path) -> None:
    """Read a file through a symbolic link, as pictures and models are read."""
    (folder / "symlink").symlink_to("file")
    (folder / "symlink").read_text()


def hard_link(folder: Path) -> None:
    """Give a file a second name, as merged weights get theirs."""
    os.link(folder / "file", folder / "hard-link")


def flock(folder: Path) -> None:
    """Lock a file, and check that a second lock fails: it keeps two trainers out of one run folder."""
    with (folder / "lock").open("w") as first, (folder / "lock").open("w") as second:
        fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
            raise OSError("two processes hold one lock")


TRIALS: tuple[Callable[[Path], None], ...] = (write, rename, symlink, hard_link, flock)


def leave(folder: str, name: str) -> dict[str, str]:
    """Try in `folder` what stages do there, and leave the folder `name`; returns the errors by the trials' names."""
    for left in Path(folder).glob(".doctor-*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > OLD:
                shutil.rmtree(left)
    errors, tried = {}, Path(folder, name)
    try:
        tried.mkdir()
    except OSError as error:
        return {"write": str(error)}
    for trial in TRIALS:
        try:
            trial(tried)
        except OSError as error:
            errors[trial.__name__] = str(error)
    return errors


def find(folder: str, name: str) -> dict[str, str]:
    """Look in `folder` for what another left under `name`, and remove it; returns {"see": error} if it is not there."""
    left = Path(folder, name)
    try:
        (left / "file").read_text()
        (left / "target" / "file").read_text()
        return {}
    except OSError as error:
        return {"see": str(error)}
    finally:
        shutil.rmtree(left, ignore_errors=True)


if __name__ == "__main__":
    act = {"leave": leave, "find": find}[sys.argv[1]]
    seen = {
        "user": os.getuid(),
        "time": time.time(),
        "python": platform.python_version(),
        "folders": {folder: act(folder, sys.argv[2]) for folder in sys.argv[3:]},
        "packages": {package.name: package.version for package in importlib.metadata.distributions()},
    }
    print(json.dumps(seen))
