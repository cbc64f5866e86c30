"""Which GPUs a job of this machine gets; the driver's list is a program that prints one."""

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from workflow_runs import ROOT

JOB = """
import os, sys, time
from vlmflow.harness import stage
stage.take(int(sys.argv[1]))
print(os.environ.get("CUDA_VISIBLE_DEVICES", "all"), flush=True)
sys.stdin.read()
"""
"""A stage that takes GPUs, says which, and works until its input ends."""


@pytest.fixture
def machine(tmp_path: Path) -> dict[str, str]:
    """The environment of a machine with three GPUs."""
    driver = tmp_path / "bin" / "nvidia-smi"
    driver.parent.mkdir()
    driver.write_text('#!/bin/sh\nfor number in 0 1 2; do echo "GPU $number: a card"; done\n')
    driver.chmod(0o755)
    path = f"{driver.parent}:{os.environ['PATH']}"
    found = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    return found | {"PATH": path, "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT / "scripts")}


def job(gpus: int, machine: dict[str, str]) -> subprocess.Popen[str]:
    call = [sys.executable, "-c", JOB, str(gpus)]
    return subprocess.Popen(call, env=machine, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def is_silent(process: subprocess.Popen[str], seconds: float = 3) -> bool:
    """Return whether a job says nothing for some seconds: it still waits."""
    return not select.select([process.stdout], [], [], seconds)[0]


def test_jobs_side_by_side_have_gpus_of_their_own(machine: dict[str, str]) -> None:
    first, second = job(1, machine), job(2, machine)
    taken = [said(first), said(second)]
    assert sorted(",".join(taken).split(",")) == ["0", "1", "2"]
    third = job(1, machine)  # waits for one of them
    assert is_silent(third)
    first.communicate()
    assert said(third) == taken[0]
    second.kill()  # a lock goes with its process, however that ends
    second.communicate()
    fourth = job(2, machine)
    assert said(fourth) == taken[1]
    for process in (third, fourth):
        process.communicate()


@pytest.mark.lengthy
def test_a_job_of_all_gpus_waits_for_the_others(machine: dict[str, str]) -> None:
    """Snakemake counts for one call; another call's jobs are held up by the locks alone."""
    one = job(1, machine)
    assert said(one) == "0"
    every = job(3, machine)
    assert is_silent(every)
    one.communicate()
    assert said(every) == "all"
    later = job(1, machine)
    assert is_silent(later)
    every.communicate()
    assert said(later) == "0"
    later.communicate()


@pytest.mark.parametrize(
    ("gpus", "given", "expected"), [(3, None, "all"), (0, None, "all"), (1, "7", "7"), (1, "7,GPU-9", "7"), (1, "", "")]
)
def test_nothing_is_chosen_where_there_is_no_choice(
    machine: dict[str, str], gpus: int, given: str | None, expected: str
) -> None:
    process = job(gpus, machine | ({} if given is None else {"CUDA_VISIBLE_DEVICES": given}))
    assert said(process) == expected
    process.communicate()


def test_on_slurm_only_stages_of_the_same_job_wait_for_each_other(machine: dict[str, str]) -> None:
    """In each job of Slurm the first GPU is number 0, whichever that is."""
    first, other = (machine | {"CUDA_VISIBLE_DEVICES": "0", "SLURM_JOB_ID": number} for number in ("71", "72"))
    one, another = job(1, first), job(1, other)
    assert said(one) == "0"
    assert not is_silent(another, 30)
    assert said(another) == "0"
    second, alone = job(1, first), job(1, first | {"VLMFLOW_SLURM_ENDS": "/ends"})
    assert said(alone) == "0", "a job of its own asks for no lock"
    assert is_silent(second, 1)
    one.communicate()
    assert said(second) == "0"
    for process in (another, second, alone):
        process.communicate()
