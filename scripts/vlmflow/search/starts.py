"""The starts of one step of a trial: how long they took, and how many in a row got nowhere.

A machine may be lost, or a pod killed as a whole, and nobody is left to say that a start has ended. So each is
recorded in the trial's run folder before it begins.
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
from msgspec.structs import replace

from vlmflow.core.account import read_account, write_account
from vlmflow.trainer.events import read_events
from vlmflow.training.failures import TrainersDiedError
from vlmflow.training.newest import Newest
from vlmflow.training.run_folder import RunFolder


class Starts(msgspec.Struct, frozen=True):
    """The starts of a step so far (`starts/STEPS.json` of the run folder).

    tries: how many in a row ended without a word, or because their trainers died, since one of them trained a step.
    reached: the last step at that time. seconds: of all that have ended, loading included. since: when the present one
    began, in seconds since 1970; null if none is under way.
    """

    tries: int
    reached: int
    seconds: float
    since: float | None


def starts_of(folder: RunFolder, steps: int) -> Starts:
    """Return the starts of the step that ends after optimizer step `steps`.

    One that ended without a word counts up to its trainers' last sign of life.
    """
    file = _file(folder, steps)
    found = read_account(file, Starts) if file.is_file() else Starts(0, 0, 0.0, None)
    if found.since is not None and folder.holder():  # that start is under way, in another process
        found = replace(found, tries=max(0, found.tries - 1), since=None)
    elif found.since is not None:
        silent = max(0.0, min(_last_sign(folder), time.time()) - found.since)
        found = replace(found, seconds=found.seconds + silent, since=None)
    step = Newest.of(read_events(folder.progress)).step
    return replace(found, tries=0, reached=step) if step > found.reached else found


@contextmanager
def one_start(folder: RunFolder, steps: int) -> Iterator[None]:
    """Record that the block trains or judges the step's model, and that it has ended.

    SIGTERM ends this process, with code 143, after that is recorded, unless the block handles the signal itself.
    """
    before = starts_of(folder, steps)
    file = _file(folder, steps)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_account(file, replace(before, tries=before.tries + 1, since=time.time()))
    began = time.monotonic()

    def end(died: bool) -> None:
        ended = replace(before, tries=before.tries + died, seconds=before.seconds + time.monotonic() - began)
        with suppress(OSError):  # its own failure must not hide the one that ended the training
            write_account(file, ended)

    def end_with_process(number: int, frame: object) -> None:
        end(False)
        # No exception: Python drops what a handler raises while it starts a process, and the trial would go on.
        os._exit(128 + number)

    handler = signal.signal(signal.SIGTERM, end_with_process)
    died = False
    try:
        yield
    except TrainersDiedError:
        died = True
        raise
    finally:
        signal.signal(signal.SIGTERM, handler)
        end(died)


def forget_tries(folder: RunFolder, steps: int) -> None:
    """Let the step be tried again, by whoever removes the answer that its tries gave."""
    write_account(_file(folder, steps), replace(starts_of(folder, steps), tries=0))


def _file(folder: RunFolder, steps: int) -> Path:
    return folder.path / "starts" / f"{steps}.json"


def _last_sign(folder: RunFolder) -> float:
    """Return when trainers last wrote something, in seconds since 1970; 0 if they never did."""
    files = (folder.progress, folder.trainer_log)
    return max((file.stat().st_mtime for file in files if file.is_file()), default=0.0)
