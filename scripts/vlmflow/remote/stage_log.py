"""Reads a job's log for its stage's progress, or the cause of its failure."""

import re
from pathlib import Path

from vlmflow.core.stage_end import FAILURE, plain

PROGRESS = re.compile(r"left|\d:\d\d|/step|evaluating and saving")
"""What follows the first middle dot in the lines of vlmflow.core.progress and vlmflow.supervisor.watch."""

LINES = 60
"""How many of a log's last lines are read."""

LONGEST = 2_000
"""Characters of a line that are shown; a longer line does not count as progress."""


def last_lines(log: Path) -> str:
    """Return the last LINES lines of a log file, as they are; "" if there is none that can be read.

    Of longer lines than LONGEST it returns fewer.
    """
    try:
        if not log.is_file():  # a device or a pipe might never end
            return ""
        with log.open("rb") as stream:
            stream.seek(max(0, log.stat().st_size - LINES * LONGEST))
            lines = stream.read(LINES * LONGEST).decode(errors="replace").split("\n")
    except OSError:
        return ""
    return "\n".join(lines[-LINES:])


def newest_progress(log: str) -> str:
    """Return the log's last line of progress, or ""."""
    for line in reversed(log.splitlines()):
        line = plain(line.rpartition("\r")[2]).strip()
        work, _, behind = line.partition(" · ")
        if len(line) <= LONGEST and work and PROGRESS.search(behind):
            return line
    return ""


def cause(log: str) -> str:
    """Return the failure that the stage reports, or else the log's last lines."""
    log = plain(log)
    if FAILURE in log:
        said = log[log.rindex(FAILURE) :].partition("\nRuleException")[0]  # Snakemake's own text in the pod
        return _cut(said.strip().splitlines()[:12])
    return _cut(log.strip().splitlines()[-8:])


def _cut(lines: list[str]) -> str:
    return "\n".join(line if len(line) <= LONGEST else f"{line[:LONGEST]} …" for line in lines)
