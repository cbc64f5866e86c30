"""Reads how a job of Slurm ended, from its state and from what its stage said."""

import json
from pathlib import Path

from vlmflow.core.printable import printable
from vlmflow.remote.ended import Ended

ENDS = {
    "BOOT_FAIL": Ended("lost", "its node did not start"),
    "CANCELLED": Ended("refused", "it was cancelled (scancel)", again=False),
    "DEADLINE": Ended("out of time", "its deadline passed", again=False),
    "NODE_FAIL": Ended("lost", "its node failed"),
    "OUT_OF_MEMORY": Ended("out of memory", "it ran out of memory"),
    "PREEMPTED": Ended("preempted", "Slurm gave its place to another job"),
    "REVOKED": Ended("lost", "another cluster took it"),
    "TIMEOUT": Ended("out of time", "it reached its time limit, without time to save"),
}
"""The states in which a job can end, besides COMPLETED and FAILED."""

GONE = Ended("lost", "Slurm no longer knows it, and it made no target")

WHY = "why"
"""The key of a verdict that says why a job does not come again."""

VERDICT_BYTES = 1000
"""A verdict is a short JSON text; whatever is longer is none."""


def ended_of(state: str, verdict: Path) -> Ended | None:
    """Return how a job ended; None if it succeeded.

    state: Slurm's word. verdict: the file into which its stage, or its Snakemake, may have written one.
    """
    if state == "COMPLETED":
        return None
    if known := ENDS.get(state.partition(" ")[0]):  # `CANCELLED by 1000`
        return known
    said = read_verdict(verdict)
    return Ended("failed", printable(str(said.get(WHY) or "its stage failed")), again=said.get("again") is not False)


def read_verdict(file: Path) -> dict[str, object]:
    """Return what a stage wrote as its verdict; {} if it wrote none that can be read."""
    try:
        with file.open("rb") as opened:
            text = opened.read(VERDICT_BYTES + 1)
        said = json.loads(text) if len(text) <= VERDICT_BYTES else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {}
