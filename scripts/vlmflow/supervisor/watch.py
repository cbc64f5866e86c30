"""Starts the trainers of a training, on all its nodes, and watches them: their progress, and whether they hang.

A rank gives signs of life at each forward pass (`in_trainer.messages`). Ranks wait for one another at least once per
step; so if one hangs, soon none gives a sign. Then each writes where it is, and is ended.
"""

import math
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from vlmflow.core.errors import PassingError, VlmflowError, log
from vlmflow.core.patience import Waiting
from vlmflow.core.progress import LOG_INTERVAL, TERMINAL_INTERVAL, clock
from vlmflow.in_trainer.messages import FOLDER, Doing, Model, beats_of, innermost_frames, new_events, stacks_of
from vlmflow.supervisor.failures import HangError, LogTail, ResumableError, failure_of
from vlmflow.supervisor.group import Group
from vlmflow.supervisor.launch import Signals, end, log_of, ranks_of, signals_passed_on, start
from vlmflow.supervisor.progress import Newest, report_line
from vlmflow.supervisor.run_folder import RunFolder
from vlmflow.swift.arguments import Training
from vlmflow.swift.model_layers import what_is_trained

Onlooker = Callable[[RunFolder, bool], None]
"""Called several times a second while trainers run, with their run folder and True; with False when they ended."""


LONGER = 60.0
"""Minutes without a sign of life that are allowed while the trainers start, or save.

Both give no sign in between, and read or write whole models. If ranks wait for one another meanwhile, ddp_timeout
(30 minutes) ends them before; this ends a rank that waits for nobody, as on a storage that does not answer.
"""

AFTER_SIGNAL = 2.0
"""Minutes without a sign of life after SIGTERM, on several nodes: trainers answer it at their next step, which never
comes when another node is gone, and the pod's grace period is better used."""

SLOW = 30.0
"""Seconds without a sign of life after which the progress of several nodes names a rank."""

FOR_STACKS = 5.0
"""Seconds for the ranks to write their stacks; one that the kernel has stopped writes none."""

FOR_STACKS_OF_OTHERS = 30.0
"""Seconds for ranks of other nodes to write their stacks: they may see an order late on a network volume."""

FRAMES = 3
"""How many of a rank's innermost frames the message has."""

ALONE_SECONDS = 20.0
"""How long trainers may go on after those of another node have failed: most notice it themselves, and say how."""


def nobody(folder: RunFolder, runs: bool) -> None:
    """Look at nothing."""


class HangWatch:
    """Watches the signs of life of the ranks of one session, from its start on."""

    def __init__(self, run_folder: Path, ranks: int, minutes: float) -> None:
        """minutes: without a sign of life, in training or evaluation."""
        self._folder = run_folder
        self._ranks = range(ranks)
        self._minutes = minutes
        shutil.rmtree(run_folder / FOLDER, ignore_errors=True)  # the signs of an earlier session
        self._seen: list[tuple[int, str]] = []
        self._silence, self._looked = Waiting(), time.monotonic()

    def silent_for(self, most: float = math.inf) -> float | None:
        """Return for how many minutes no rank gave a sign of life, if that is too long. It looks once a second.

        most: minutes that are too long in any case, in training or evaluation. It counts anew if this process itself
        was stopped: so were the ranks then (scontrol suspend, SIGSTOP, a paused machine).
        """
        if time.monotonic() - self._looked < 1:
            return None
        self._looked = time.monotonic()
        signs = [_sign(beats_of(self._folder, rank)) for rank in self._ranks]
        if signs != self._seen:
            self._seen = signs
            self._silence.begin()
        usual = all(doing in (Doing.TRAINING, Doing.EVALUATING) for _, doing in signs)
        minutes = self._silence.seconds() / 60
        allowed = min(self._minutes, most) if usual else max(self._minutes, LONGER)
        return minutes if minutes > allowed else None

    def in_words(self) -> str:
        """Return how many ranks are at work, and which of them have been silent for a while."""
        now, silent = time.time(), []
        for rank in self._ranks:
            at, doing = _sign(beats_of(self._folder, rank))
            if doing in (Doing.TRAINING, Doing.EVALUATING) and now - at / 1e9 > SLOW:
                silent.append(f"rank {rank} silent for {clock(now - at / 1e9)}")
        return ", ".join(silent) or f"{len(self._ranks)} ranks"

    def where(self, trainers: subprocess.Popen[bytes], group: Group, trainer_log: Path) -> str:
        """Return where each rank is, after its stacks were appended to the trainers' log.

        trainers: torchrun, whose children are the ranks of this node. group: the other nodes.
        """
        group.write("stacks")
        for process in ranks_of(trainers).values():
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGUSR1)
        give_up = time.monotonic() + (FOR_STACKS_OF_OTHERS if group.others else FOR_STACKS)
        places = []
        for rank in self._ranks:
            stacks = _stacks_in(stacks_of(self._folder, rank), give_up)
            with trainer_log.open("a") as file:
                file.write(f"\nrank {rank} hangs; its stacks:\n{stacks or 'it does not answer'}\n")
            frames = ", from ".join(innermost_frames(stacks, FRAMES))
            doing = _sign(beats_of(self._folder, rank))[1]
            places.append(f"rank {rank}, {doing}, {f'is in {frames}' if frames else 'does not answer'}")
        return "; ".join(places)


def _sign(file: Path) -> tuple[int, str]:
    """Return when a rank gave its last sign of life, and what it is doing; it starts if it gave none yet."""
    try:
        return file.stat().st_mtime_ns, file.read_text() or Doing.STARTING
    except FileNotFoundError:
        return 0, Doing.STARTING


def _stacks_in(file: Path, give_up: float) -> str:
    """Return what a rank has written, once that no longer grows; "" if there is nothing by then (monotonic seconds)."""
    size = 0
    while time.monotonic() < give_up:
        time.sleep(0.2)
        now = file.stat().st_size if file.is_file() else 0
        if now and now == size:
            break
        size = now
    return file.read_text(errors="replace") if file.is_file() else ""


def end_of_whole_lines(progress: Path) -> int:
    """Remove an incomplete last line of the progress file, which a full disk leaves, and return the file's size."""
    with progress.open("a+b") as file:
        file.seek(0)
        content = file.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            file.truncate(whole)
    return whole


@dataclass(frozen=True)
class Launcher:
    """Starts and watches the trainers of a run folder that this process holds.

    lock: the run folder's lock, which this node's trainers hold as long as they run. group: the other nodes. label: the
    stage and run, for messages. onlooker: see `Onlooker`.
    """

    folder: RunFolder
    lock: int
    group: Group
    label: str
    onlooker: Onlooker = nobody

    def launch(self, training: Training, resume: Path | None) -> None:
        """Train until the trainers end, with progress on the console. resume: the checkpoint to resume from.

        After SIGTERM or SIGINT (Ctrl-C) to this process the trainers save a checkpoint and end; while they still load,
        they end at once.
        Raises VlmflowError with the cause if they fail, on any node; HangError after they were ended because they hang.
        """
        folder, group = self.folder, self.group
        folder.output.mkdir(exist_ok=True)
        hangs = HangWatch(folder.path, training.ranks, training.settings.hang_minutes)
        seen = end_of_whole_lines(folder.progress)
        logs = [LogTail(log_of(folder, node)) for node in range(training.nodes)]
        error: VlmflowError | None = None
        with signals_passed_on() as signals:
            passed_on = signals.numbers
            trainers = start(training, folder, resume, group.threads, group.begin(resume), self.lock)
            signals.trainers = trainers
            try:
                silent = self._watch(trainers, hangs, seen, signals, logs[0])
                if silent is not None:
                    error = self._end_hang(hangs, trainers, silent)
            finally:
                self.onlooker(folder, False)
        if error is not None or trainers.returncode:  # also if the kernel does not end those of this node
            for node in group.still_running():
                logs[node].end_here()  # they end because we end them
            group.stop(bool(passed_on))
        if error is None and trainers.returncode:
            error = failure_of(trainers.returncode, logs, self.label, passed_on)
        if isinstance(error, ResumableError) and passed_on:  # who wants them to end does not want them to resume
            error = PassingError(error.cause, error.next_step)
        if error is not None:
            raise error

    def _watch(
        self, trainers: subprocess.Popen[bytes], hangs: HangWatch, seen: int, signals: Signals, log_tail: LogTail
    ) -> float | None:
        """Print the trainers' progress from the folder's progress file, from byte `seen` on, until they end or hang.

        signals: what they are told. log_tail: their output. They also end, or are ended, after those of another node
        have failed.

        Returns the minutes without a sign of life if they hang.
        """
        interval = TERMINAL_INTERVAL if sys.stderr.isatty() else LOG_INTERVAL
        shown_at, shown = -interval, ""
        lost_since: Waiting | None = None
        told_at: Waiting | None = None
        newest = Newest()
        with self.folder.progress.open("rb") as lines:
            lines.seek(seen)
            while True:
                ended = trainers.poll() is not None
                for event in new_events(lines):
                    newest.take(event)
                    if isinstance(event, Model):
                        log.info(f"{self.label}: {what_is_trained(event.layers)}")
                line = report_line(newest)
                if line != shown and (ended or time.monotonic() - shown_at >= interval):
                    shown_at, shown = time.monotonic(), line
                    ranks = f" · {hangs.in_words()}" if line and self.group.others else ""
                    print(f"{self.label}: {line}{ranks}", file=sys.stderr, flush=True)
                if ended:
                    return None
                signals.pass_on()
                told_at = told_at or (Waiting() if signals.numbers else None)
                long_ago = told_at is not None and told_at.seconds() > AFTER_SIGNAL * 60
                most = AFTER_SIGNAL if long_ago and self.group.others else math.inf
                if (silent := hangs.silent_for(most)) is not None:
                    return silent
                if lost := self.group.lost():
                    lost_since = lost_since or Waiting()
                    if lost_since.seconds() > ALONE_SECONDS:
                        log.warning(f"{self.label}: the trainers of node {lost[0]} have failed; ending the others")
                        log_tail.end_here()
                        end(trainers)
                self.onlooker(self.folder, True)
                time.sleep(0.2)

    def _end_hang(self, hangs: HangWatch, trainers: subprocess.Popen[bytes], minutes: float) -> VlmflowError:
        """End trainers of this node that hang; returns the error, with where each rank was.

        It is a PassingError if the kernel does not end them, otherwise a HangError.
        """
        where = hangs.where(trainers, self.group, self.folder.trainer_log)
        if not end(trainers):
            return PassingError(
                f"{self.label}: the trainers hang, and do not end when they are killed",
                "they wait for a disk or a GPU that does not answer: restart this machine, or run the same command on "
                "another one",
            )
        return HangError(
            f"{self.label}: no sign of life for {minutes:.2g} minutes; {where}",
            f"the stacks are in {self.folder.trainer_log}: most ranks wait in a collective operation for the one that "
            "is elsewhere",
        )
