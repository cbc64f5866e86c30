"""What a pod's log says about its stage: how far it has come, or why it failed."""

import re

from harness.plain_text import plain
from harness.stage import FAILURE

PROGRESS = re.compile(r"left|\d:\d\d|/step|evaluating and saving")
"""What stands behind the first middle dot in the lines of vlmflow.core.progress and vlmflow.training.launch."""

LINES = 60
"""How many of a log's last lines are looked at."""

LONGEST = 2_000
"""Characters of a line that are shown; a longer one is no line of progress."""


def newest_progress(log: str) -> str:
    """Give the log's last line of progress; nothing where there is none."""
    for line in reversed(log.splitlines()):
        line = plain(line.rpartition("\r")[2]).strip()
        work, _, behind = line.partition(" · ")
        if len(line) <= LONGEST and work and PROGRESS.search(behind):
            return line
    return ""


def cause(log: str) -> str:
    """Give what the stage says of its failure, or else the log's last lines."""
    log = plain(log)
    if FAILURE in log:
        said = log[log.rindex(FAILURE) :].partition("\nRuleException")[0]  # what Snakemake says of it in the pod
        return _cut(said.strip().splitlines()[:12])
    return _cut(log.strip().splitlines()[-8:])


def _cut(lines: list[str]) -> str:
    return "\n".join(line if len(line) <= LONGEST else f"{line[:LONGEST]} …" for line in lines)
