"""A lease on a run folder, for volumes on which one machine does not see the locks of another (flock on some NFS).

The holder increases a count in `lease-NUMBER.json`. Whoever finds a lease watches it: while the count changes, the
holder lives. If it stops for SILENCE seconds by the watcher's own clock, the watcher takes over by creating the next
number, which only one can do. The highest number holds. A holder that finds a higher one (it was frozen, or cut off)
ends at once: its writes would mix with another trainer's files.

filelock's SoftFileLease is similar, but gives up its claim when the volume is unreachable for longer than its duration,
although nobody can take over then: a training of days would end.
"""

import json
import logging
import os
import re
import signal
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from vlmflow.core.errors import PassingError
from vlmflow.core.patience import Waiting

log = logging.getLogger("vlmflow")

BEAT = 2.0
"""Seconds between two counts."""

SILENCE = 20.0
"""Seconds without a count after which a holder counts as dead."""

LENGTH = 512
"""Bytes of a lease file: each count overwrites the last one, so a full disk does not stop it."""


NAME = re.compile(r"lease-([1-9][0-9]{0,8})\.json")


@dataclass(frozen=True)
class Sign:
    """The content of a lease file; a file that is being written and cannot be parsed has an empty token."""

    number: int
    holder: str
    machine: str
    token: str
    count: int
    released: bool


class Lease:
    """The lease on one folder."""

    def __init__(self, folder: Path, machine: str | None = None, beat: float = BEAT, silence: float = SILENCE) -> None:
        """Describe a lease, without taking it.

        machine: the name within which locks work; a lease from our own machine is free, since we hold the folder's
        lock. beat, silence: see BEAT and SILENCE.
        """
        self.folder = folder
        self.machine = machine or this_machine()
        self.beat = beat
        self.silence = silence
        self.token = uuid.uuid4().hex

    @contextmanager
    def held(self, patience: float) -> Iterator[None]:
        """Hold the lease while the block runs.

        Raises PassingError with the holder's name if another one lives and does not end within `patience` seconds.
        """
        number = self._win(patience)
        ended = threading.Event()
        counting = threading.Thread(target=self._count, args=(number, ended), daemon=True)
        counting.start()
        try:
            yield
        finally:
            ended.set()
            counting.join()
            self._write(number, count=-1, released=True)

    def _win(self, patience: float) -> int:
        waiting, silence, seen, lives = Waiting(), Waiting(), newest(self.folder), False
        while True:
            current = newest(self.folder)
            if current != seen:
                seen, lives = current, True
                silence.begin()
            quiet, waited = silence.seconds(), waiting.seconds()
            silent = current is not None and quiet > self.silence
            if current is None or current.released or current.machine == self.machine or silent:
                if silent and current is not None:
                    log.info(f"{self.folder}: {current.holder} has been silent for {self.silence:.0f} s; taking over")
                if self._create(number := current.number + 1 if current else 1):
                    return number
            elif lives and current.token and waited > patience:
                raise PassingError(
                    f"{self.folder}: {current.holder} is training here",
                    "wait for it to end, or stop it; then run the same command again",
                )
            time.sleep(min(0.5, self.beat / 4))

    def _create(self, number: int) -> bool:
        """Create the lease of a number, and remove older ones; returns whether we were the first."""
        try:
            self._file(number).open("xb").close()
        except FileExistsError:
            return False
        self._write(number, count=0)
        for older in numbers(self.folder):
            if older < number:
                self._file(older).unlink(missing_ok=True)
        return True

    def _count(self, number: int, ended: threading.Event) -> None:
        count = 0
        while not ended.wait(self.beat):
            count += 1
            try:
                current = newest(self.folder)
                if current is None or current.number != number or current.token != self.token:
                    holder = current.holder if current else "another process"
                    _end_at_once(f"{self.folder}: {holder} took over this run folder")
                self._write(number, count)
            except OSError as error:  # while the volume is unreachable, nobody can write to it or take over
                log.debug(f"{self._file(number)}: {error}")

    def _write(self, number: int, count: int, released: bool = False) -> None:
        says = {
            "holder": f"process {os.getpid()} on {socket.gethostname()}",
            "machine": self.machine,
            "token": self.token,
            "count": count,
            "released": released,
        }
        # Closed each time: only then others see it over NFS.
        with self._file(number).open("r+b") as file:
            file.write(json.dumps(says).encode().ljust(LENGTH))

    def _file(self, number: int) -> Path:
        return self.folder / f"lease-{number}.json"


def this_machine() -> str:
    """Return a name for the machine or pod that is unique until it restarts."""
    return f"{socket.gethostname()} {Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"


def newest(folder: Path) -> Sign | None:
    """Return the lease with the highest number; None if there is none."""
    while number := max(numbers(folder), default=0):
        try:
            return Sign(number, **json.loads((folder / f"lease-{number}.json").read_bytes()))
        except FileNotFoundError:  # taken over meanwhile
            continue
        except (ValueError, TypeError, RecursionError):
            return Sign(number, "another process", "", "", 0, False)
    return None


def numbers(folder: Path) -> list[int]:
    """Return the numbers of the leases in a run folder."""
    names = (NAME.fullmatch(file.name) for file in folder.iterdir())
    return [int(match[1]) for match in names if match]


def _end_at_once(why: str) -> None:
    """Kill the trainers and this process; after SIGTERM the trainers would still save a checkpoint."""
    log.error(f"{why}; ending at once, so that only one trainer writes to it")
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            child.kill()
    os.kill(os.getpid(), signal.SIGKILL)
