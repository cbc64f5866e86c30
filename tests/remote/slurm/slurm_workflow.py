"""The workflow on the tests' Slurm, called as a person would on a login node."""

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import yaml

from cluster.cluster_workflow import THREADS
from slurm.slurm_cluster import SlurmCluster
from vlmflow.in_trainer import process as trainer
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
