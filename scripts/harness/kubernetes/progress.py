"""What a pod's log says about its stage: how far it has come, or why it failed."""

import re

from harness.stage import FAILURE

PROGRESS = re.compile(r"\S.* · .*(left|\d:\d\d|/step|evaluating and saving)")
"""The lines of vlmflow.progress and vlmflow.training.launch: parts between middle dots, the last one a time."""

LINES = 60
"""How many of a log's last lines are looked at."""


def newest_progress(log: str) -> str:
    """Give the log's last line of progress; nothing where there is none."""
    for line in reversed(log.splitlines()):
        line = line.rpartition("\r")[2].strip()
        if PROGRESS.match(line):
            return line
    return ""


def cause(log: str) -> str:
    """Give what the stage says of its failure, or else the log's last lines."""
    if FAILURE in log:
        said = log[log.rindex(FAILURE) :].partition("\nRuleException")[0]  # what Snakemake says of it in the pod
        return "\n".join(said.strip().splitlines()[:12])
    return "\n".join(log.strip().splitlines()[-8:])
