"""The signs of life of a training: which file each rank touches, and where it writes its stacks when it is asked.

A rank touches its file before each forward pass, of training and of evaluation. The file's content is what the rank is
doing, since some of that may take longer (`Doing`). On SIGUSR1 a rank writes the stacks of all its threads into a file
of its own, also while it is stuck in compiled code (Python's faulthandler).
"""

import faulthandler
import os
import re
import signal
import time
from enum import StrEnum
from pathlib import Path

FOLDER = "heartbeats"
"""The folder of these files in a run folder."""

FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
"""A line of faulthandler's output: file, line and function."""


class Doing(StrEnum):
    """What a rank is doing. starting: until the first forward pass. saving: a checkpoint, or its end."""

    STARTING = "starting"
    TRAINING = "training"
    EVALUATING = "evaluating"
    SAVING = "saving"


def beats_of(run_folder: Path, rank: int) -> Path:
    """Return the file that a rank touches."""
    return run_folder / FOLDER / f"rank-{rank}"


def stacks_of(run_folder: Path, rank: int) -> Path:
    """Return the file into which a rank writes its stacks."""
    return run_folder / FOLDER / f"rank-{rank}.stacks"


class Heart:
    """The signs of life of this process, which is a rank of a training. rank: its number."""

    def __init__(self, run_folder: Path, rank: int) -> None:
        """Begin with `Doing.STARTING`, and write the stacks on SIGUSR1 from now on."""
        self.rank = rank
        self._born = time.monotonic()
        self._file = beats_of(run_folder, rank)
        self._file.parent.mkdir(exist_ok=True)
        self._doing: Doing | None = None
        self._stacks = stacks_of(run_folder, rank).open("w")
        faulthandler.register(signal.SIGUSR1, file=self._stacks, all_threads=True)
        self.beat(Doing.STARTING)

    @property
    def age(self) -> float:
        """Seconds since this process began."""
        return time.monotonic() - self._born

    @property
    def doing(self) -> Doing | None:
        """What this process said last that it is doing."""
        return self._doing

    def beat(self, doing: Doing) -> None:
        """Say that this process is alive, and what it is doing."""
        if doing is self._doing:
            return os.utime(self._file)
        self._doing = doing
        self._file.write_text(doing)


def innermost_frames(stacks: str, count: int) -> list[str]:
    """Return where a rank was, innermost first, from its stacks: "function (file:line)".

    The main thread answers the signal, so it is the one that faulthandler calls current; "" has no frames.
    """
    _, current, after = stacks.rpartition("Current thread")
    thread = after.partition("\n\n")[0] if current else stacks.rpartition("\n\n")[2]
    return [
        f"{function} ({'/'.join(Path(file).parts[-2:])}:{line})"
        for file, line, function in FRAME.findall(thread)[:count]
    ]
