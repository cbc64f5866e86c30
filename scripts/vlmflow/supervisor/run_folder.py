"""The folder of a training: bound to data and settings, written by one trainer at a time.

It is not an output of a rule, because Snakemake deletes the outputs of a failed job.
"""

import fcntl
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from vlmflow.core.errors import PassingError, VlmflowError
from vlmflow.core.files import write_json
from vlmflow.core.lease import Lease
from vlmflow.core.printable import printable
from vlmflow.in_trainer.messages import PROGRESS

log = logging.getLogger("vlmflow")

JOB = "job.json"
"""What a run folder is bound to."""

PATIENCE = 120.0
"""Seconds to wait for another trainer to end: one that lost its parent saves a checkpoint and ends."""

HOLDER = 200
"""Bytes of a lock that messages show; a holder writes its process and its host's name there."""


@dataclass(frozen=True)
class RunFolder:
    """The places in one run folder."""

    path: Path

    @property
    def output(self) -> Path:
        """The folder of the trainer's checkpoints."""
        return self.path / "checkpoints"

    @property
    def progress(self) -> Path:
        """JSON lines that the trainer writes as it goes; see `in_trainer.messages`."""
        return self.path / PROGRESS

    @property
    def trainer_log(self) -> Path:
        """The trainer's output."""
        return self.path / "trainer.log"

    def holder(self) -> str | None:
        """Return the process of this machine that trains here now, as messages call it; None if there is none.

        It asks for the lock for a moment: a training that begins at that moment waits half a second.
        """
        try:
            with self._lock.open() as lock:
                fcntl.flock(lock.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return self._named_holder()
        except FileNotFoundError:
            pass
        return None

    def held_since(self) -> float:
        """Return when the newest holder got the folder, in seconds since 1970."""
        return self._lock.stat().st_mtime

    def _named_holder(self) -> str:
        """Return what the holder wrote into the lock, without characters that a terminal would obey."""
        with self._lock.open("rb") as lock:
            text = lock.read(HOLDER).decode(errors="replace").strip()
        return printable(text) or "another process"

    @property
    def _lock(self) -> Path:
        return self.path / "lock"

    @property
    def page(self) -> Path:
        """The page that shows the training while it runs."""
        return self.path / "run.html"

    @contextmanager
    def held(self, describe: dict[str, object], patience: float = PATIENCE) -> Iterator[int]:
        """Hold the folder for this process alone; yields the lock's file descriptor.

        A child that inherits the descriptor keeps the lock when we are killed: a later run then waits for that orphan
        instead of writing beside it. On volumes without locks between machines, a lease excludes other machines (see
        `Lease`). describe: what the folder is bound to, for its job.json.

        Raises PassingError if another trainer holds it longer than `patience` seconds.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with self._lock.open("a+") as lock:
            self._wait_for(lock.fileno(), patience)
            lock.truncate(0)
            lock.write(f"process {os.getpid()} on {socket.gethostname()}")
            lock.flush()
            with Lease(self.path).held(patience):
                if not (self.path / JOB).exists():
                    write_json(self.path / JOB, describe)
                yield lock.fileno()

    @contextmanager
    def set_aside_where_refused(self, what: str) -> Iterator[None]:
        """Rename the folder if the block refuses the training's input: no run resumes from it, and nothing is lost.

        what: the stage and run, for the message.

        Raises the block's VlmflowError with the folder's new name. After a PassingError the folder stays: such an error
        does not concern the input.
        """
        try:
            yield
        except PassingError:
            raise
        except VlmflowError as error:
            aside = next(
                place
                for place in (self.path.with_name(f"{self.path.name}.refused-{number}") for number in count(1))
                if not place.exists()
            )
            self.path.rename(aside)
            raise VlmflowError(
                f"{what}: the input changed during training: {error.cause}",
                f"{error.next_step}; then run the same command again: it trains from the first step, because it is "
                f"unknown what the steps so far were trained on (their run folder is now {aside})",
            ) from None

    def _wait_for(self, lock: int, patience: float) -> None:
        give_up = time.monotonic() + patience
        said = False
        while True:
            try:
                return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = self._named_holder()
            if time.monotonic() > give_up:
                raise PassingError(
                    f"{self.path}: {holder} is training here",
                    "wait for it to end, or stop it; then run the same command again",
                )
            if not said:
                log.info(f"{self.path}: waiting for {holder} to end its training")
                said = True
            time.sleep(0.5)
