"""Finds a training that hangs, notes where each rank is, and ends it.

A rank gives signs of life at each forward pass (`trainer.heartbeat`). Ranks wait for one another at least once per
step; so if one hangs, soon none gives a sign.
"""

import logging
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import psutil

from vlmflow.core.errors import PassingError
from vlmflow.trainer.heartbeat import FOLDER, Doing, beats_of, innermost_frames, stacks_of
from vlmflow.training.resumed import HangError

log = logging.getLogger("vlmflow")

LONGER = 60.0
"""Minutes without a sign of life that are allowed while the trainers start, or save.

Both give no sign in between, and read or write whole models. If ranks wait for one another meanwhile, ddp_timeout
(30 minutes) ends them before; this ends a rank that waits for nobody, as on a storage that does not answer.
"""

GRACE = 10.0
"""Seconds for the ranks to save and end, between SIGTERM and SIGKILL: one that was only slow may do so."""

FOR_STACKS = 5.0
"""Seconds for a rank to write its stacks; one that the kernel has stopped writes none."""

FOR_END = 60.0
"""Seconds for killed processes to end; one that waits for a dead disk or GPU does not."""

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

    def silent_for(self) -> float | None:
        """Return for how many minutes no rank gave a sign of life, if that is too long. It looks once a second."""
        now = time.monotonic()
        if now - self._looked < 1:
            return None
        self._looked = now
        signs = [_sign(beats_of(self._folder, rank)) for rank in self._ranks]
        if signs != self._seen:
            self._seen, self._since = signs, now
        usual = all(doing in (Doing.TRAINING, Doing.EVALUATING) for _, doing in signs)
        minutes = (now - self._since) / 60
        return minutes if minutes > (self._minutes if usual else max(self._minutes, LONGER)) else None

    def where(self, trainers: subprocess.Popen[bytes], trainer_log: Path) -> str:
        """Return where each rank is, after its stacks were appended to the trainers' log.

        trainers: torchrun, whose children are the ranks.
        """
        places = []
        for rank, process in sorted(_ranks(trainers).items()):
            stacks = _ask_for_stacks(process, stacks_of(self._folder, rank))
            with trainer_log.open("a") as file:
                file.write(f"\nrank {rank} hangs; its stacks:\n{stacks or 'it does not answer'}\n")
            frames = ", from ".join(innermost_frames(stacks, FRAMES))
            doing = _sign(beats_of(self._folder, rank))[1]
            places.append(f"rank {rank}, {doing}, {f'is in {frames}' if frames else 'does not answer'}")
        return "; ".join(places)


def end_hang(
    watch: HangWatch, trainers: subprocess.Popen[bytes], trainer_log: Path, minutes: float, what: str
) -> HangError:
    """End trainers that hang; returns the error, with where each rank was.

    Raises PassingError if the kernel does not end them.
    """
    where = watch.where(trainers, trainer_log)
    _end(trainers, what)
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


def _ranks(trainers: subprocess.Popen[bytes]) -> dict[int, psutil.Process]:
    found = {}
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(trainers.pid).children():
            with suppress(psutil.Error, KeyError):
                found[int(child.environ()["RANK"])] = child
    return found


def _ask_for_stacks(rank: psutil.Process, file: Path) -> str:
    with suppress(psutil.NoSuchProcess):
        rank.send_signal(signal.SIGUSR1)
    give_up, size = time.monotonic() + FOR_STACKS, 0
    while time.monotonic() < give_up:
        time.sleep(0.2)
        now = file.stat().st_size if file.is_file() else 0
        if now and now == size:
            break
        size = now
    return file.read_text(errors="replace") if file.is_file() else ""


def _end(trainers: subprocess.Popen[bytes], what: str) -> None:
    """Let the ranks save and end, then kill them and their own children. torchrun ends with its ranks."""
    everybody = [] if trainers.poll() is not None else psutil.Process(trainers.pid).children(recursive=True)
    for process in _ranks(trainers).values():
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    _, alive = psutil.wait_procs(everybody, timeout=GRACE)
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    try:
        trainers.wait(FOR_END)
    except subprocess.TimeoutExpired:
        raise PassingError(
            f"{what}: the trainers hang, and do not end when they are killed",
            "they wait for a disk or a GPU that does not answer: restart this machine, or run the same command on "
            "another one",
        ) from None
