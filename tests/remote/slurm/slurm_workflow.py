"""The workflow on the tests' Slurm, called as a person would on a login node, and calls that tests watch and end."""

import itertools
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from cluster.cluster_workflow import THREADS
from slurm.slurm_cluster import SlurmCluster
from vlmflow.core.processes import bound_to_this_process
from vlmflow.in_trainer import process as trainer
from vlmflow.remote.slurm.queue import QueuedJob
from vlmflow.remote.slurm.queue import jobs as jobs_of_slurm
from vlmflow.remote.slurm.request import digest
from workflow_runs import ROOT

PROFILE = ROOT / "profiles" / "slurm"


def call(folder: Path, *words: str, **resources: dict[str, Any]) -> list[str]:
    """Return Snakemake's command line for a demo folder. words: its last. resources: by rule, besides PROFILE's."""
    given = yaml.safe_load((PROFILE / "config.yaml").read_text())["set-resources"]
    changed = {rule: given.get(rule, {}) | resources.get(rule, {}) for rule in given.keys() | resources.keys()}
    places = ["--snakefile", ROOT / "Snakefile", "--directory", folder, "--profile", PROFILE]
    files = ["--configfile", ROOT / "profiles" / "demo" / "run.yaml", folder / "quick.yaml"]
    # The command line's replace all of a profile's (docs/slurm.md).
    asked = [f"{rule}:{name}={value}" for rule, names in changed.items() for name, value in names.items()]
    own = [*places, *files, *THREADS, "--set-resources", *asked]
    return [sys.executable, "-m", "snakemake", *map(str, own), *words]


def jobs(slurm: SlurmCluster, folder: Path) -> dict[str, dict[str, Any]]:
    """Return what Slurm knows of the jobs of a folder, by id, also of those that ended in the last minutes."""
    numbers = slurm.run("squeue", "--noheader", "--states=all", "--format=%i").split()
    known = {number: slurm.job(number) for number in numbers}
    return {number: job for number, job in known.items() if job["WorkDir"] == str(folder)}


def names(slurm: SlurmCluster, folder: Path) -> Counter[str]:
    """Return how many jobs of each rule a folder has had: every `sbatch` is one, however often it comes again."""
    return Counter(job["JobName"].partition(":")[0] for job in jobs(slurm, folder).values())


def trainers(folder: Path) -> list[psutil.Process]:
    """Return the trainers that run in a demo folder, on any node."""

    def trains(process: psutil.Process) -> bool:
        try:
            words = process.cmdline()
            return (
                trainer.__name__ in words
                and "torch.distributed.run" not in words
                and folder in Path(process.cwd()).parents
            )
        except psutil.Error:
            return False

    return [process for process in psutil.process_iter() if trains(process)]


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
        found = [
            job for job in jobs_of_slurm().values() if job.words[1:2] == (ours,) and job.name.partition(":")[0] in rules
        ]
        return sorted(found, key=lambda job: int(job.id))
