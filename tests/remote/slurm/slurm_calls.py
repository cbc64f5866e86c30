"""Calls of Snakemake on the login node that tests watch and end."""

import itertools
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from vlmflow.core.processes import bound_to_this_process
from vlmflow.remote.slurm.queue import QueuedJob, jobs
from vlmflow.remote.slurm.request import digest
from workflow_runs import ROOT


class Call:
    """One call of Snakemake in a folder. It ends with the tests at the latest."""

    numbers = itertools.count(1)

    def __init__(self, folder: Path, command: Sequence[str], environment: Mapping[str, str] = {}) -> None:
        self.folder = folder
        self._log = folder / f"call-{next(self.numbers)}.log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=bound_to_this_process(),
            )

    @property
    def said(self) -> str:
        """Its output so far."""
        return self._log.read_text(errors="replace")

    def until(self, what: str, check: Callable[[], object], limit: float = 60) -> None:
        """Wait while it runs until something is so; fail with its output if it is not."""
        end = time.monotonic() + limit
        while not check():
            if self.process.poll() is not None or time.monotonic() > end:
                pytest.fail(f"{what}: not so\n{self.said[-6000:]}")
            time.sleep(0.2)

    def wait_for(self, words: str, limit: float = 60) -> None:
        """Wait until it has said something."""
        self.until(f"it says {words!r}", lambda: words in self.said, limit)

    def end(self, code: int = 0, limit: float = 180) -> str:
        """Wait until it ends, and return its output; fail unless it ends with `code`."""
        assert self.process.wait(limit) == code, self.said[-6000:]
        return self.said

    def jobs(self, *rules: str) -> list[QueuedJob]:
        """Return its folder's jobs that Slurm knows, also those that have ended, in the order of their submission."""
        ours = digest(str(self.folder))
        found = [job for job in jobs().values() if job.words[1:2] == (ours,) and job.name.partition(":")[0] in rules]
        return sorted(found, key=lambda job: int(job.id))
