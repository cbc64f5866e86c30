"""Finds a training that hangs, notes where each rank is, and ends it.

A rank gives signs of life at each forward pass (`in_trainer.heartbeat`). Ranks wait for one another at least once per
step; so if one hangs, soon none gives a sign.
"""

import logging
import math
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import psutil

from vlmflow.core.errors import PassingError
from vlmflow.core.progress import clock
from vlmflow.in_trainer.heartbeat import FOLDER, Doing, beats_of, innermost_frames, stacks_of
from vlmflow.supervisor.agent import end, ranks_of
from vlmflow.supervisor.group import Group
from vlmflow.supervisor.resumed import HangError

log = logging.getLogger("vlmflow")

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


class HangWatch:
    """Watches the signs of life of the ranks of one session, from its start on."""

    def __init__(self, run_folder: Path, ranks: int, minutes: float) -> None:
        """minutes: without a sign of life, in training or evaluation."""
        self._folder = run_folder
        self._ranks = range(ranks)
        self._minutes = minutes
        shutil.rmtree(run_folder / FOLDER, ignore_errors=True)  # the signs of an earlier session
        self._seen: list[tuple[int, str]] = []
        self._since = self._looked = time.monotonic()

    def silent_for(self, most: float = math.inf) -> float | None:
        """Return for how many minutes no rank gave a sign of life, if that is too long. It looks once a second.

        most: minutes that are too long in any case, in training or evaluation.
        """
        now = time.monotonic()
        if now - self._looked < 1:
            return None
        self._looked = now
        signs = [_sign(beats_of(self._folder, rank)) for rank in self._ranks]
        if signs != self._seen:
            self._seen, self._since = signs, now
        usual = all(doing in (Doing.TRAINING, Doing.EVALUATING) for _, doing in signs)
        minutes = (now - self._since) / 60
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
        group.ask_for_stacks()
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


def end_hang(
    watch: HangWatch, trainers: subprocess.Popen[bytes], group: Group, trainer_log: Path, minutes: float, what: str
) -> HangError | PassingError:
    """End trainers of this node that hang; returns the error, with where each rank was.

    It is a PassingError if the kernel does not end them.
    """
    where = watch.where(trainers, group, trainer_log)
    if not end(trainers):
        return PassingError(
            f"{what}: the trainers hang, and do not end when they are killed",
            "they wait for a disk or a GPU that does not answer: restart this machine, or run the same command on "
            "another one",
        )
    return HangError(
        f"{what}: no sign of life for {minutes:.2g} minutes; {where}",
        f"the stacks are in {trainer_log}: most ranks wait in a collective operation for the one that is elsewhere",
    )


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
