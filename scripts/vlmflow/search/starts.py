"""The starts of one step of a trial: how long they took, and how many in a row got nowhere.

A machine may be lost, or a pod killed as a whole, and nobody is left to say that a start has ended. So each is
recorded in the trial's run folder before it begins. Several searches may train in that folder: each has its own hours.
"""

import logging
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec.structs import replace as replace_fields

from vlmflow.core.account import read_account, write_account
from vlmflow.in_trainer.messages import read_events
from vlmflow.search.accounts import Amount
from vlmflow.supervisor.failures import TrainersDiedError
from vlmflow.supervisor.progress import Newest
from vlmflow.supervisor.run_folder import RunFolder

log = logging.getLogger("vlmflow")


@dataclass(frozen=True)
class Step:
    """A step of a search's trial. folder: where it trains. search: its name. steps: the optimizer step that ends it."""

    folder: RunFolder
    search: str
    steps: int

    @property
    def file(self) -> Path:
        """The account of its starts."""
        return self.folder.path / "starts" / f"{self.steps}-{self.search}.json"


class Starts(msgspec.Struct, frozen=True):
    """The starts of a step so far (`starts/STEPS-SEARCH.json` of the run folder).

    tries: how many in a row ended without a word, or because their trainers died, since one of them trained a step.
    reached: the last step at that time. seconds: of all that have ended, loading included. since: when the present one
    began, in seconds since 1970; null if none is under way.
    """

    tries: Annotated[int, msgspec.Meta(ge=0)]
    reached: Annotated[int, msgspec.Meta(ge=0)]
    seconds: Amount
    since: Amount | None


def wait_for_others(folder: RunFolder) -> None:
    """Wait until no process of this machine trains in a folder: one of a killed Snakemake, or of another search.

    Only then all that they trained, and how long they took, is known.
    """
    said = False
    while holder := folder.holder():
        if not said:
            log.info(f"{folder.path}: waiting for {holder} to end its training")
            said = True
        time.sleep(0.5)


def starts_of(step: Step) -> Starts:
    """Return the starts of a step.

    One that ended without a word counts up to its trainers' last sign of life.
    """
    found = read_account(step.file, Starts) if step.file.is_file() else Starts(0, 0, 0.0, None)
    if found.since is not None:
        found = _ended(found, step.folder)
    reached = Newest.of(read_events(step.folder.progress)).step
    return replace_fields(found, tries=0, reached=reached) if reached > found.reached else found


@contextmanager
def one_start(step: Step) -> Iterator[None]:
    """Record that the block trains or judges the step's model, and that it has ended.

    SIGTERM ends this process, with code 143, after that is recorded, unless the block handles the signal itself.
    """
    step.file.parent.mkdir(parents=True, exist_ok=True)
    _close_all(step.folder)
    before = starts_of(step)
    write_account(step.file, replace_fields(before, tries=before.tries + 1, since=time.time()))
    began = time.monotonic()

    def end(died: bool) -> None:
        ended = replace_fields(before, tries=before.tries + died, seconds=before.seconds + time.monotonic() - began)
        with suppress(OSError):  # its own failure must not hide the one that ended the training
            write_account(step.file, ended)

    def end_with_process(number: int, frame: object) -> None:
        end(False)
        log.error("SIGTERM ended the trial; the same command resumes it")
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


def _close_all(folder: RunFolder) -> None:
    """End all starts in a folder that nobody ended: what is trained from now on is another's, and no time of theirs."""
    for file in (folder.path / "starts").glob("*.json"):
        found = read_account(file, Starts)
        if found.since is not None:
            write_account(file, _ended(found, folder))


def _ended(found: Starts, folder: RunFolder) -> Starts:
    """Return the account of a start that ended without a word: it took until its trainers' last sign of life."""
    assert found.since is not None
    silent = max(0.0, min(_last_sign(folder), time.time()) - found.since)
    return replace_fields(found, seconds=found.seconds + silent, since=None)


def forget_tries(step: Step) -> None:
    """Let the step be tried again, by whoever removes the answer that its tries gave."""
    write_account(step.file, replace_fields(starts_of(step), tries=0))


def _last_sign(folder: RunFolder) -> float:
    """Return when trainers last wrote something, in seconds since 1970; 0 if they never did."""
    files = (folder.progress, folder.trainer_log)
    return max((file.stat().st_mtime for file in files if file.is_file()), default=0.0)
