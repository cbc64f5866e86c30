"""The tests' Slurm itself: what the workflow's code takes for granted, as real sites have it."""

import sys
import time
from pathlib import Path

import pytest

from cluster.shell import wait_for
from slurm.slurm_cluster import FOLDER, SlurmCluster
from vlmflow.core.errors import VlmflowError

OPENS = """
import errno, os, sys, time
print("sees", os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
for number in 0, 1:
    try:
        os.open(f"{sys.argv[1]}/nvidia{number}", os.O_RDWR)
    except OSError as error:
        print(number, errno.errorcode[error.errno], flush=True)
while not os.path.exists(sys.argv[2]):
    time.sleep(0.1)
"""
"""Tries to open both GPUs of a node, and ends when a file is there."""

TWO_PROCESSES = """
import os, signal, time
name = "child" if os.fork() == 0 else "first"
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
if signal.sigtimedwait([signal.SIGTERM], 90):
    print(name, "was told", flush=True)
    time.sleep(2)
"""


def python(folder: Path, text: str, *words: object) -> str:
    """Return a line of shell that runs a program as a step of a job."""
    program = folder / "program.py"
    program.write_text(text)
    return " ".join(["exec", "srun", sys.executable, str(program), *map(str, words)])


def test_it_starts_quickly(own_slurm: SlurmCluster) -> None:
    own_slurm.down()
    begun = time.monotonic()
    own_slurm.up()
    assert time.monotonic() - begun < 20
    assert own_slurm.run("sinfo", "--noheader", "--partition=cpu", "--format=%D %t").split() == ["2", "idle"]


def test_a_job_sees_only_its_own_gpu_as_number_0(slurm: SlurmCluster, tmp_path: Path) -> None:
    line = python(tmp_path, OPENS, FOLDER, tmp_path / "enough")
    jobs = [slurm.submit(line, "--partition=gpu", "--gpus=1", "--nodelist=node-a") for _ in range(2)]
    wait_for("both have looked", lambda: all(slurm.said(job).count("\n") == 3 for job in jobs))
    said = [slurm.said(job).splitlines() for job in jobs]
    # No driver serves the device: who may open it learns that.
    assert sorted(said) == [["sees 0", "0 ENXIO", "1 EPERM"], ["sees 0", "0 EPERM", "1 ENXIO"]]
    third = slurm.submit("true", "--partition=gpu", "--gpus=1", "--nodelist=node-a")
    wait_for("it says why it waits", lambda: slurm.job(third)["Reason"] == "Resources")
    (tmp_path / "enough").touch()
    assert slurm.wait_for_job(third, "COMPLETED", "FAILED") == "COMPLETED"


@pytest.mark.slow
def test_a_signal_before_the_limit_reaches_only_the_first_process_of_a_step(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    """So the job's Snakemake has to pass it on (vlmflow.remote.slurm.in_job)."""
    job = slurm.submit(python(tmp_path, TWO_PROCESSES), "--signal=TERM@50")
    slurm.wait_for_job(job, "COMPLETED", limit=90)
    assert "first was told" in slurm.said(job)
    assert "child was told" not in slurm.said(job)


@pytest.mark.slow
def test_a_requeued_job_starts_again_soon(slurm: SlurmCluster) -> None:
    job = slurm.submit("echo $SLURM_RESTART_COUNT; sleep 60")
    slurm.wait_for_job(job, "RUNNING")
    begun = time.monotonic()
    slurm.run("scontrol", "requeue", job)
    wait_for("it runs again", lambda: slurm.job(job)["JobState"] == "RUNNING" and slurm.job(job)["Restarts"] == "1")
    assert 5 < time.monotonic() - begun < 30


@pytest.mark.slow
def test_a_job_outlives_the_controller(slurm: SlurmCluster, tmp_path: Path) -> None:
    job = slurm.submit(f"touch {tmp_path}/runs; until [ -e {tmp_path}/enough ]; do sleep 0.1; done; exit 3")
    wait_for("it runs", (tmp_path / "runs").exists)
    slurm.stop_controller()
    with pytest.raises(VlmflowError, match="slurm_load_jobs error"):
        slurm.run("squeue")
    slurm.start_controller()
    assert slurm.job(job)["JobState"] == "RUNNING"
    (tmp_path / "enough").touch()
    slurm.wait_for_job(job, "FAILED")
    assert slurm.job(job)["ExitCode"] == "3:0"


@pytest.mark.slow
def test_a_job_of_a_lost_node_comes_again_on_another_one(slurm: SlurmCluster) -> None:
    job = slurm.submit("hostname; sleep 60")
    wait_for("it runs", lambda: slurm.said(job))
    node = slurm.job(job)["NodeList"]
    slurm.kill_node(node)
    wait_for("it runs elsewhere", lambda: slurm.job(job)["JobState"] == "RUNNING" and slurm.job(job)["Restarts"] == "1")
    assert slurm.job(job)["NodeList"] != node
    slurm.start_node(node)
