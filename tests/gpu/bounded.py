"""Programs with a limit of time, and their logs."""

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

GRACE = 10
"""Seconds in which a program may end by itself before it is killed."""

LAST_LINES = 15


@dataclass(frozen=True)
class Ended:
    """How a program ended. seconds: it took. code: of its exit; None if its time was over. log: all of its output."""

    seconds: float
    code: int | None
    log: Path

    @property
    def status(self) -> str:
        """What a table says of it."""
        return {None: f"cut off after {self.seconds:.0f} s", 0: "done"}.get(self.code, f"failed with code {self.code}")

    @property
    def figures(self) -> dict[str, object]:
        """Its status and seconds; if it did not end well, the last lines of its log."""
        said = self.log.read_text(errors="replace").splitlines()[-LAST_LINES:]
        return {"status": self.status, "seconds": self.seconds} | ({} if self.code == 0 else {"log": said})


def start(command: Sequence[object], log: Path, environment: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Start a program in a session of its own, with its output in a log."""
    with log.open("wb") as output:
        return subprocess.Popen(
            [str(word) for word in command],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )


def bounded(command: Sequence[object], log: Path, seconds: float, environment: dict[str, str] | None = None) -> Ended:
    """Run a program for at most so many seconds."""
    begun = time.monotonic()
    process = start(command, log, environment)
    try:
        code: int | None = process.wait(seconds)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        end(process)
    return Ended(round(time.monotonic() - begun, 1), code, log)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a program that was started with `start`, with what it has started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, number)
            try:
                process.wait(GRACE)
            except subprocess.TimeoutExpired:
                continue
