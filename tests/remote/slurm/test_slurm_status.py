"""`make status` on a login node."""

import subprocess
import sys
from pathlib import Path

import pytest

from cluster.shell import wait_for
from slurm.slurm_cluster import SlurmCluster
from vlmflow.remote.slurm.waiting import will_not_start
from workflow_runs import ROOT

PROGRESS = "mine · step 4/10 · loss 3.000 · 2.00 s/step · 0:12 left"
OURS = "--comment=vlmflow folder key identity"
LONG = f"echo '{PROGRESS}'; echo a warning; sleep 60"


def status(slurm: SlurmCluster, folder: Path) -> list[str]:
    """Return what it prints: of this machine, then of Slurm."""
    words = [sys.executable, ROOT / "scripts" / "vlmflow" / "tools" / "status.py", "any", "--directory", folder]
    habits = {"SQUEUE_PARTITION": "urgent", "SLURM_TIME_FORMAT": "relative"}
    environment = {**slurm.environment, **habits, "KUBECONFIG": str(folder / "none")}
    done = subprocess.run(words, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_a_job_is_shown_with_its_progress_or_why_it_waits(slurm: SlurmCluster, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    here, trains = f"--chdir={tmp_path}", f"this machine trains nothing in {tmp_path}/stores/runs"
    assert status(slurm, tmp_path) == [trains, "Slurm has no job of vlmflow"]
    gpus = ("--partition=gpu", "--gpus=2")
    first = slurm.submit(LONG, OURS, here, *gpus, "--job-name=train_model:run=mine", "--nodelist=node-a")
    second = slurm.submit(LONG, OURS, f"--chdir={other}", *gpus, "--job-name=train_model:run=yours")
    slurm.submit(LONG, here, "--job-name=strange")
    for job in (first, second):
        wait_for("it runs", lambda job=job: PROGRESS in slurm.said(job))
    third = slurm.submit(LONG, OURS, here, *gpus, "--job-name=train_smoke:run=mine")
    fourth = slurm.submit(LONG, OURS, here, "--job-name=mix_rows:run=mine", "--hold")
    wait_for("Slurm says why it waits", lambda: slurm.job(third)["Reason"] == "Resources")
    said, *lines = status(slurm, tmp_path)
    rows = {line.split("  ")[0]: " ".join(line.split()) for line in lines}
    assert (said, sorted(rows)) == (
        trains,
        ["mix_rows run=mine", "train_model run=mine", "train_model run=yours", "train_smoke run=mine"],
    )
    running, elsewhere = rows["train_model run=mine"], rows["train_model run=yours"]
    assert running.startswith("train_model run=mine running 0:")
    assert running.endswith(f" node-a {first} {PROGRESS}")
    assert elsewhere.endswith(f" node-b {second} in {other}: {PROGRESS}")
    waiting, held = rows["train_smoke run=mine"], rows["mix_rows run=mine"]
    assert waiting.startswith("train_smoke run=mine waiting 0:")
    assert f" - {third} all that it could use is taken" in waiting
    assert held.endswith(f" - {fourth} it is held: `scontrol release NUMBER` lets it start")
    slurm.run("scancel", third)
    assert not [line for line in status(slurm, tmp_path) if "train_smoke" in line]


@pytest.mark.parametrize(
    ("reason", "asked"),
    [
        ("PartitionTimeLimit", ["--partition=gpu", "--time=1000"]),
        ("PartitionNodeLimit", ["--nodes=3"]),
        ("PartitionConfig", ["--cpus-per-task=8"]),
    ],
)
def test_what_slurm_takes_though_it_never_starts(slurm: SlurmCluster, reason: str, asked: list[str]) -> None:
    job = slurm.submit("true", *asked)
    wait_for("Slurm says why it waits", lambda: slurm.job(job)["Reason"] == reason)
    assert will_not_start(reason)


def test_an_outage_of_the_controller_is_a_line(slurm: SlurmCluster, tmp_path: Path) -> None:
    slurm.stop_controller()
    said = status(slurm, tmp_path)[1]
    assert said.startswith("Slurm does not answer: squeue: slurm_load_jobs error: Unable to contact slurm controller")
