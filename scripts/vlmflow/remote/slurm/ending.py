"""Ends jobs for good: those that wait at once, and trainers after they have saved a checkpoint."""

import time
from collections.abc import Callable, Collection, Mapping

from vlmflow.core.printable import counted
from vlmflow.remote.slurm.commands import SlurmError, ask
from vlmflow.remote.slurm.queue import jobs

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
