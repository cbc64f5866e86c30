"""Which rows were in which step: one text file per rank in the run folder.

A line is an optimizer step: its number, then for each forward pass the rows, by their lines in the train file from 0.

    17 403,88 12,5        step 17 of two forward passes, with two rows each

A line is written before the step is trained, so a step that fails has one. A step that was trained again after a resume
has several; the last one counts. A last line without its end was cut by a kill, and does not count.
"""

import errno
import os
import re
from pathlib import Path

FOLDER = "rows_of_steps"
"""The folder of these files in a run folder."""

Batch = list[int]
"""The rows of one forward pass on one rank, by their lines in the train file from 0."""

LINE = re.compile(rb"(\d+)((?: \d+(?:,\d+)*)*)")


class RowLog:
    """Writes the file of one rank."""

    def __init__(self, run_folder: Path, rank: int) -> None:
        """Continue the file; an incomplete last line is removed."""
        file = _file_of(run_folder, rank)
        file.parent.mkdir(exist_ok=True)
        self._file = file.open("a+b", buffering=0)
        self._file.seek(0)
        self._file.truncate(self._file.read().rfind(b"\n") + 1)

    def write(self, step: int, batches: list[Batch]) -> None:
        """Record the rows of a step that is trained now."""
        line = " ".join([str(step), *(",".join(map(str, batch)) for batch in batches)]).encode() + b"\n"
        if self._file.write(line) < len(line):  # the next line would continue this one
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._file.name)


def rows_of_step(run_folder: Path, step: int) -> dict[int, list[Batch]]:
    """Return the batches of a step by rank, in the order of the forward passes; none if no rank reached it.

    Lines of another form are skipped: they are of no step.
    """
    files = {int(file.stem.rpartition("-")[2]): file for file in (run_folder / FOLDER).glob("rank-*.txt")}
    found = {rank: _last_line(file, step) for rank, file in sorted(files.items())}
    return {rank: batches for rank, batches in found.items() if batches is not None}


def last_step(run_folder: Path) -> int:
    """Return the last step that began, or 0."""
    steps = [
        int(line.partition(b" ")[0])
        for file in (run_folder / FOLDER).glob("rank-*.txt")
        for line in file.read_bytes().split(b"\n")[-2:-1]
        if LINE.fullmatch(line)
    ]
    return max(steps, default=0)


def _last_line(file: Path, step: int) -> list[Batch] | None:
    found = None
    begin = f"{step} ".encode()
    for line in file.read_bytes().split(b"\n")[:-1]:
        if line.startswith(begin) and LINE.fullmatch(line):
            found = line
    if found is None:
        return None
    return [[int(row) for row in batch.split(",")] for batch in found.decode().split()[1:]]


def _file_of(run_folder: Path, rank: int) -> Path:
    return run_folder / FOLDER / f"rank-{rank}.txt"
