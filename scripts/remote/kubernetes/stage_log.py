"""Reads a pod's log for its stage's progress, or the cause of its failure."""

import re

from vlmflow.core.stage_end import FAILURE, plain

PROGRESS = re.compile(r"left|\d:\d\d|/step|evaluating and saving")
"""What follows the first middle dot in the lines of vlmflow.core.progress and vlmflow.training.launch."""

LINES = 60
"""How many of a log's last lines are read."""

LONGEST = 2_000
"""Characters of a line that are shown; a longer line does not count as progress."""


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
