"""Tells on the screen what becomes of jobs while Snakemake follows them: why they wait, and how far they are."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from vlmflow.core.printable import printable
from vlmflow.core.progress import LOG_INTERVAL
from vlmflow.remote.slurm.queue import QueuedJob
from vlmflow.remote.slurm.waiting import explain
from vlmflow.remote.stage_log import last_lines, newest_progress

UNTIL_SAID = 30.0
"""Seconds that a job waits before it is said why: most start at once."""


@dataclass
class _Known:
    """What was said of a job. since: when it was first seen waiting. started: whether it has been seen running."""

    reason: str = ""
    since: float | None = None
    started: bool = False
    progress: str = ""
    shown: float = field(default=-LOG_INTERVAL)


class News:
    """Says each thing once. say: prints a line."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say = say
        self._clock = clock
        self._known: dict[str, _Known] = {}

    def tell(self, words: str, job: QueuedJob, log: Path) -> None:
        """Say what is new of a job. words: its rule and wildcards. log: the file of its output."""
        known, now = self._known.setdefault(job.id, _Known()), self._clock()
        if job.state == "PENDING":
            if known.started:
                self._say(f"{words}: job {job.id} is in the queue again, and resumes; this uses no retry")
                self._known[job.id] = known = _Known()
            known.since = now if known.since is None else known.since
            if job.reason != known.reason and now - known.since >= UNTIL_SAID:
                known.reason = job.reason
                self._say(f"{words}: job {job.id} waits: {printable(explain(job.reason))}")
        elif job.state == "RUNNING":
            known.started = True
            if now - known.shown >= LOG_INTERVAL and (line := newest_progress(last_lines(log))) != known.progress:
                known.progress, known.shown = line, now
                self._say(printable(line))
