"""Starts the trainers of a training, on all its nodes, and watches them."""

import logging
import math
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vlmflow.core.errors import PassingError, VlmflowError
from vlmflow.core.printable import counted
from vlmflow.core.progress import LOG_INTERVAL, TERMINAL_INTERVAL
from vlmflow.in_trainer.events import Model, new_events
from vlmflow.in_trainer.model_layers import what_is_trained
from vlmflow.supervisor.agent import end, let_them_save, log_of, start
from vlmflow.supervisor.failures import Said, failure_of
from vlmflow.supervisor.group import Group
from vlmflow.supervisor.hangs import AFTER_SIGNAL, HangWatch, end_hang
from vlmflow.supervisor.newest import Newest, report_line
from vlmflow.supervisor.onlooker import Onlooker, nobody
from vlmflow.supervisor.resumed import ResumableError
from vlmflow.supervisor.run_folder import RunFolder
from vlmflow.swift.arguments import Training

log = logging.getLogger("vlmflow")

ALONE_SECONDS = 20.0
"""How long trainers may go on after those of another node have failed: most notice it themselves, and say how."""


def launch(
    training: Training,
    folder: RunFolder,
    resume: Path | None,
    lock: int,
    group: Group,
    what: str,
    onlooker: Onlooker = nobody,
) -> None:
    """Train in `folder` until the trainers end, with progress on the console.

    resume: the checkpoint to resume from. lock: the run folder's lock, which this node's trainers hold as long as they
    run. group: the other nodes. what: the stage and run, for messages. onlooker: see `onlooker`.

    After SIGTERM or SIGINT (Ctrl-C) to this process the trainers save a checkpoint and end; while they still load, they
    end at once.
    Raises VlmflowError with the cause if they fail, on any node; HangError after they were ended because they hang.
    """
    folder.output.mkdir(exist_ok=True)
    hangs = HangWatch(folder.path, training.ranks, training.settings.hang_minutes)
    seen = end_of_whole_lines(folder.progress)
    logs = [Said(log_of(folder, node)) for node in range(training.nodes)]
    error: VlmflowError | None = None
    with signals_passed_on() as signals:
        passed_on = signals.numbers
        trainers = start(training, folder, resume, group.threads, group.begin(resume), lock)
        signals.trainers = trainers
        try:
            silent = _watch(trainers, hangs, group, folder, seen, what, onlooker, signals, logs[0])
            if silent is not None:
                error = end_hang(hangs, trainers, group, folder.trainer_log, silent, what)
        finally:
            onlooker(folder, False)
    if error is not None or trainers.returncode:  # also if the kernel does not end those of this node
        for node in group.still_running():
            logs[node].end_here()  # they end because we end them
        group.stop(bool(passed_on))
    if error is None and trainers.returncode:
        error = failure_of(trainers.returncode, logs, what, passed_on)
    if isinstance(error, ResumableError) and passed_on:  # who wants them to end does not want them to resume
        error = PassingError(error.cause, error.next_step)
    if error is not None:
        raise error


def end_of_whole_lines(progress: Path) -> int:
    """Remove an incomplete last line of the progress file, which a full disk leaves, and return the file's size."""
    with progress.open("a+b") as file:
        file.seek(0)
        content = file.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            file.truncate(whole)
    return whole


class Signals:
    """The signals that this process got for its trainers. numbers: of all of them so far. trainers: torchrun."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.trainers: subprocess.Popen[bytes] | None = None
        self._asked: set[int] = set()

    def take(self, number: int, frame: Any) -> None:
        """Handle a signal. It raises nothing: Python drops what a handler raises while it starts a process."""
        self.numbers.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self.pass_on()
        name = signal.Signals(number).name
        asked = counted(len(self._asked), "trainer")
        log.info(f"{name}: to save a checkpoint and end: {asked}; those that still load end at once")

    def pass_on(self) -> None:
        """Let the trainers know of a signal, if there was one; also those that have started since."""
        if self.numbers and self.trainers is not None:
            let_them_save(self.trainers, self._asked)


@contextmanager
def signals_passed_on() -> Iterator[Signals]:
    """Pass SIGTERM and Ctrl-C to torchrun's children, which save and end; torchrun would kill them after 30 s.

    A second Ctrl-C ends at once.
    """
    signals = Signals()
    before = {number: signal.signal(number, signals.take) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _watch(
    trainers: subprocess.Popen[bytes],
    hangs: HangWatch,
    group: Group,
    folder: RunFolder,
    seen: int,
    what: str,
    onlooker: Onlooker,
    signals: Signals,
    said: Said,
) -> float | None:
    """Print the trainers' progress from the folder's progress file, from byte `seen` on, until they end or hang.

    signals: what they are told. said: their output. They also end, or are ended, after those of another node have
    failed.

    Returns the minutes without a sign of life if they hang.
    """
    interval = TERMINAL_INTERVAL if sys.stderr.isatty() else LOG_INTERVAL
    shown_at, shown = -interval, ""
    lost_since: float | None = None
    asked_at: float | None = None
    newest = Newest()
    with folder.progress.open("rb") as lines:
        lines.seek(seen)
        while True:
            ended = trainers.poll() is not None
            for event in new_events(lines):
                newest.take(event)
                if isinstance(event, Model):
                    log.info(f"{what}: {what_is_trained(event.layers)}")
            line = report_line(newest)
            if line != shown and (ended or time.monotonic() - shown_at >= interval):
                shown_at, shown = time.monotonic(), line
                ranks = f" · {hangs.in_words()}" if line and group.others else ""
                print(f"{what}: {line}{ranks}", file=sys.stderr, flush=True)
            if ended:
                return None
            signals.pass_on()
            asked_at = asked_at or (time.monotonic() if signals.numbers else None)
            long_ago = asked_at is not None and time.monotonic() - asked_at > AFTER_SIGNAL * 60
            most = AFTER_SIGNAL if long_ago and group.others else math.inf
            if (silent := hangs.silent_for(most)) is not None:
                return silent
            if lost := group.lost():
                lost_since = lost_since or time.monotonic()
                if time.monotonic() - lost_since > ALONE_SECONDS:
                    log.warning(f"{what}: the trainers of node {lost[0]} have failed; ending the others")
                    said.end_here()
                    end(trainers)
            onlooker(folder, True)
            time.sleep(0.2)
