"""Finds the jobs that earlier calls left: a call that was killed, or that could not end them."""

import threading
from collections.abc import Callable

from vlmflow.remote.slurm.ending import wait_until_ended
from vlmflow.remote.slurm.queue import OURS, QueuedJob, jobs
from vlmflow.remote.slurm.request import folder_digest


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
