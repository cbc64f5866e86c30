"""Trains one trial of a search up to the end of its step, and says what came of it.

A training that cannot go on is an answer, as one that reaches its step is. A training that was stopped from outside is
none: the same command resumes it.

A machine may be lost, or a pod killed as a whole, and nobody is left to say that a start has ended. So each start is
recorded in the trial's run folder before it begins: how long it took, and how many in a row got nowhere. Several
searches may train in that folder: each has its own hours.
"""

import json
import math
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec.structs import replace as replace_fields

from vlmflow.config.search_settings import trained_with
from vlmflow.core import child_programs
from vlmflow.core.account import read_account, write_account
from vlmflow.core.errors import VlmflowError, log
from vlmflow.core.patience import RunningTime
from vlmflow.in_trainer.messages import End, read_events
from vlmflow.search.study import Amount, AskedTrial, TrialResult
from vlmflow.supervisor.failures import TrainersDiedError, refuse_bad_step
from vlmflow.supervisor.progress import Newest
from vlmflow.supervisor.run_folder import RunFolder
from vlmflow.supervisor.train import OutOfHoursError, Trained, TrainingFailedError, train
from vlmflow.swift.arguments import Training

TRIES = 2
"""How often in a row a step may get nowhere before that is its answer: its trainers died, or nobody was left to say
why, as when a pod without memory is killed as a whole. A cluster starts a failed job twice more (profiles/kubernetes).
"""


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
    began, in seconds since 1970; null if none is under way. A time in which the process was stopped does not count.
    """

    tries: Annotated[int, msgspec.Meta(ge=0)]
    reached: Annotated[int, msgspec.Meta(ge=0)]
    seconds: Amount
    since: Amount | None


def wait_for_others(folder: RunFolder) -> None:
    """Wait until no process of this machine trains in a folder: one of a killed Snakemake, or of another search.

    Only then all that they trained, and how long they took, is known.
    """
    logged = False
    while holder := folder.holder():
        if not logged:
            log.info(f"{folder.path}: waiting for {holder} to end its training")
            logged = True
        time.sleep(0.5)


def starts_of(step: Step) -> Starts:
    """Return the starts of a step.

    One that ended without a word counts up to its trainers' last sign of life.
    """
    starts = read_account(step.file, Starts) if step.file.is_file() else Starts(0, 0, 0.0, None)
    if starts.since is not None:
        starts = _ended(starts, step.folder)
    reached = Newest.of(read_events(step.folder.progress)).step
    return replace_fields(starts, tries=0, reached=reached) if reached > starts.reached else starts


@contextmanager
def one_start(step: Step) -> Iterator[None]:
    """Record that the block trains or judges the step's model, and that it has ended.

    SIGTERM ends this process, with code 143, after that is recorded, unless the block handles the signal itself.
    """
    step.file.parent.mkdir(parents=True, exist_ok=True)
    # What is trained from now on is another's, and no time of a start that nobody ended.
    for file in (step.folder.path / "starts").glob("*.json"):
        starts = read_account(file, Starts)
        if starts.since is not None:
            write_account(file, _ended(starts, step.folder))
    before = starts_of(step)
    write_account(step.file, replace_fields(before, tries=before.tries + 1, since=time.time()))
    running = RunningTime()

    def end(died: bool) -> None:
        ended = replace_fields(before, tries=before.tries + died, seconds=before.seconds + running.close())
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


def _ended(starts: Starts, folder: RunFolder) -> Starts:
    """Return the account of a start that ended without a word: it took until its trainers' last sign of life."""
    assert starts.since is not None
    files = (folder.progress, folder.trainer_log)
    last_sign = max((file.stat().st_mtime for file in files if file.is_file()), default=0.0)
    silent = max(0.0, min(last_sign, time.time()) - starts.since)
    return replace_fields(starts, seconds=starts.seconds + silent, since=None)


def forget_tries(step: Step) -> None:
    """Let the step be tried again, by whoever removes the answer that its tries gave."""
    write_account(step.file, replace_fields(starts_of(step), tries=0))


@dataclass(frozen=True)
class Ended:
    """A step of a trial. trained: its checkpoints; None if it is not done."""

    result: TrialResult
    trained: Trained | None
    step: Step


class KeptResult(msgspec.Struct, frozen=True):
    """A finished step's result in the trial's run folder, for whoever asks for it again. search: who trained it."""

    search: str
    result: TrialResult

    def of(self, search: str, trial: AskedTrial) -> TrialResult:
        """Return it as the answer to what a search asks; what another one trained costs it no hours."""
        hours = {} if search == self.search else {"hours": 0.0, "gpu_hours": 0.0}
        return replace_fields(self.result, number=trial.number, settings=trial.settings, **hours)


def empty_slot(reason: str | None) -> TrialResult:
    """Return the result of a slot of which nothing is asked."""
    return TrialResult(
        number=None,
        settings={},
        state="empty",
        reason=reason,
        steps=0,
        value=None,
        mem_mb=None,
        hours=0.0,
        gpu_hours=0.0,
        curve=[],
    )


def of_trial(training: Training, trial: AskedTrial) -> Training:
    """Return a run's training with a trial's settings, up to the end of its step."""
    return replace(training, settings=trained_with(training.settings, trial.settings), stop_at=trial.steps)


def kept_file(own: Training, runs: Path, judged_by: Mapping[str, Any]) -> Path:
    """Return the file of a trial's run folder that keeps a finished step's result (`KeptResult`).

    A result that is made again, perhaps after later steps have trained on, is then the same. own: the trial's training.
    judged_by: objective, and all but the training that decides its value.
    """
    how = sha256(json.dumps(judged_by, sort_keys=True).encode()).hexdigest()[:16]
    return runs / own.digest() / "results" / f"{own.stop_at}-{how}.json"


def went_on(own: Training, runs: Path) -> bool:
    """Return whether a trial has trained beyond the end of its step, for a later one."""
    assert own.stop_at is not None
    return Newest.of(read_events(RunFolder(runs / own.digest()).progress)).step > own.stop_at


def run_trial(trial: AskedTrial, own: Training, runs: Path, threads: int, search: str) -> Ended:
    """Train a trial in its run folder under `runs`, which its later steps go on in.

    own: its training. threads: cores for all its trainers. search: whose it is. It waits for whoever trains there.

    Raises PassingError if the training was stopped from outside, VlmflowError if this machine cannot train; a training
    that fails is a result, as is one whose trainers die twice at the same place.
    """
    step = Step(RunFolder(runs / own.digest()), search, trial.steps)
    label = f"search {search}, trial {trial.number}"
    wait_for_others(step.folder)
    try:
        refuse_bad_step(step.folder, own.data.train, label)
    except VlmflowError as error:  # it said so before: asked again, it costs no hours, so that its answer is the same
        log.warning(error.cause)
        return Ended(_result(trial, step, own.ranks, error.cause), None, step)
    died = None
    while (before := starts_of(step)).tries < TRIES:
        hours = None if trial.hours is None else max(0.0, trial.hours - before.seconds / 3600)
        try:
            with one_start(step):
                trained = train(replace(own, hours=hours), runs, threads, label)
            return Ended(_result(trial, step, own.ranks, None), trained, step)
        except OutOfHoursError as error:
            log.warning(f"{error.cause} (search.NAME.limits; with more hours it resumes there)")
            return Ended(_result(trial, step, own.ranks, error.cause, stopped=True), None, step)
        except TrainingFailedError as error:
            log.warning(f"{error.cause}\n  what to do: {error.next_step}")
            return Ended(_result(trial, step, own.ranks, error.cause), None, step)
        except TrainersDiedError as error:
            died = error.cause
            log.warning(f"{died} ({error.next_step})")
            if child_programs.NODE_0 in os.environ and starts_of(step).tries < TRIES:
                raise  # the other nodes' pods ended with this start: the cluster starts all of them again
    forget_tries(step)
    silent = "it ended without a word, probably because main memory ran out (runs.NAME.resources)"
    return Ended(_result(trial, step, own.ranks, f"{died or silent}; {TRIES} times in a row"), None, step)


def _result(trial: AskedTrial, step: Step, ranks: int, failure: str | None, stopped: bool = False) -> TrialResult:
    """Return what the events of a run folder say about a step. failure: why it ended before the step's end.

    The value is the lowest validation loss up to that step, as a run keeps its best checkpoint.
    """
    events = read_events(step.folder.progress)
    newest = Newest.of(events)
    curve = sorted((step, loss) for step, loss in newest.eval_losses.items() if step <= trial.steps)
    finite = [loss for _, loss in curve if math.isfinite(loss)]
    if failure is None and not finite:
        failure = "no evaluation gave a finite validation loss"
    hours = starts_of(step).seconds / 3600
    ends = [max(each.peak_memory) for each in events if isinstance(each, End) and each.peak_memory]
    memory = max([*ends, *([newest.memory] if newest.memory else [])], default=None)
    return TrialResult(
        number=trial.number,
        settings=trial.settings,
        state="stopped" if stopped else "failed" if failure else "done",
        reason=failure,
        steps=min(newest.step, trial.steps),
        value=None if failure else min(finite),
        mem_mb=None if memory is None else memory / 1e6,
        hours=hours,
        gpu_hours=hours * ranks,
        curve=[(step, loss) for step, loss in curve if math.isfinite(loss)],
    )
