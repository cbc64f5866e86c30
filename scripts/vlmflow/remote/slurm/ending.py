"""Reads how a job of Slurm ended, from its state and from what its stage said.

Ends jobs for good: those that wait at once, and trainers after they have saved a checkpoint.

Finds the jobs that earlier calls left: a call that was killed, or that could not end them.
"""

import json
import threading
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from vlmflow.core.errors import counted, printable
from vlmflow.remote.job import Ended
from vlmflow.remote.slurm.queue import OURS, QueuedJob, SlurmError, ask, jobs
from vlmflow.remote.slurm.request import folder_digest

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


UNTIL_ENDED = 120.0
"""Seconds to wait for jobs that Slurm is ending; it kills them after KillWait, 30 s where nobody has changed it."""


def end_jobs(warnings: Mapping[str, int], say: Callable[[str], None]) -> None:
    """End jobs, and return when they have ended.

    warnings: the seconds that each has to save, by its number; 0 if it saves nothing. say: prints a line. Ctrl-C
    (KeyboardInterrupt) ends all at once.
    """
    numbers = list(warnings)
    try:
        for number in numbers:  # so that none asks to come again
            _try("scontrol", "update", f"JobId={number}", "Requeue=0")
        _cancel(numbers, "--state=PENDING")
        saving = [number for number, job in jobs().items() if warnings.get(number) and job.state == "RUNNING"]
        if saving:
            say(f"{counted(len(saving), 'job')} of trainers: to save a checkpoint and end. Ctrl-C ends them at once.")
        _cancel(saving, "--signal=TERM")
        _cancel([number for number in numbers if number not in saving])
        give_up = time.monotonic() + max((warnings[number] for number in saving), default=0)
        while saving and time.monotonic() < give_up:
            time.sleep(1)
            queue = jobs()
            saving = [number for number in saving if number in queue and queue[number].is_active]
        _cancel(saving)
    except KeyboardInterrupt:
        _cancel(numbers)
    except SlurmError as error:
        say(f"{error.cause}; these jobs may still run: {' '.join(numbers)}. scancel ends them.")


def wait_until_ended(numbers: Collection[str]) -> None:
    """Wait for jobs that Slurm is ending, at most UNTIL_ENDED: until then their stages may still write.

    Raises SlurmError if Slurm gives no answer.
    """
    give_up = time.monotonic() + UNTIL_ENDED
    while time.monotonic() < give_up:
        queue = jobs()
        if not any(number in queue and queue[number].state == "COMPLETING" for number in numbers):
            return
        time.sleep(1)


def _cancel(numbers: list[str], *options: str) -> None:
    if numbers:
        _try("scancel", *options, *numbers)


def _try(*words: str) -> None:
    """Run a command that also fails for a job which has just ended. Raises SlurmError if Slurm does not answer."""
    try:
        ask(*words)
    except SlurmError as error:
        if error.outage:
            raise


class EarlierJobs:
    """The jobs that earlier calls left in a folder. seen: the numbers of all jobs of Slurm that are no news."""

    def __init__(self, workdir: str, say: Callable[[str], None]) -> None:
        """Read the queue, after jobs have ended that Slurm is ending: one that was cancelled makes nothing any more.

        Raises SlurmError if Slurm gives no answer.
        """
        self._lock, ours = threading.Lock(), (OURS, folder_digest(workdir))
        if ending := [job for job in jobs().values() if job.words[:2] == ours and job.state == "COMPLETING"]:
            say(f"waiting for jobs of an earlier call to end: {_names(ending)}")
            wait_until_ended([job.id for job in ending])
        queue = jobs()
        self.seen = set(queue)
        self._left = [
            job for job in queue.values() if job.words[:2] == ours and job.is_active and job.state != "COMPLETING"
        ]
        if self._left:
            say(f"Jobs of an earlier call still run: {_names(self._left)}")

    def take(self, stages: list[str]) -> list[QueuedJob]:
        """Return those that make one of these stages (the last words of `request.comment_of`), each only once."""
        with self._lock:  # two threads submit
            found = [one for one in self._left if not set(one.words[3:]).isdisjoint(stages)]
            self._left = [one for one in self._left if one not in found]
        return found


def _names(left: list[QueuedJob]) -> str:
    return ", ".join(f"{job.name} ({job.id})" for job in left)
