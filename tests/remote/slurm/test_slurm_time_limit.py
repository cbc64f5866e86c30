"""A training that needs more time than a job may have: it saves, comes again by itself, and resumes."""

import json
import re
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import psutil

from cluster.cluster_workflow import ONE_NODE, STEPS
from cluster.shell import wait_for
from slurm.slurm_cluster import SlurmCluster
from slurm.slurm_workflow import call, jobs, trainers
from vlmflow.core.files import sha256_of
from workflow_runs import RUN, copy_folder

FULL = f"checkpoints/{RUN}/full"
LIMITED = {"slurm_partition": "short", "warning_seconds": 60, "runtime": 600}
"""Slurm looks at limits every 30 s: it tells the job 30 to 60 s after its start."""

PAUSED_AFTER = 30
"""Steps after which the trainers pause until they are told: the demo trains for seconds, Slurm's limits are minutes."""


def losses(progress: Path) -> list[tuple[int, float]]:
    """Return step and loss of each step of a training, in the order in which they were made."""
    lines = [json.loads(line) for line in progress.read_text().splitlines() if line.endswith("}")]
    return [(line["step"], line["loss"]) for line in lines if line.get("target") == STEPS and "loss" in line]


def made(folder: Path) -> int:
    """Return the number of steps that the trainers of a folder have made up to now."""
    return sum(len(losses(file)) for file in folder.glob(f"stores/runs/{RUN}/full/*/progress.jsonl"))


def send(number: signal.Signals, processes: list[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def only_job(slurm: SlurmCluster, folder: Path) -> dict[str, str]:
    """Return what Slurm knows of the one job that a folder has had."""
    (job,) = jobs(slurm, folder).values()
    return job


def test_a_training_ended_at_its_time_limit_resumes_to_the_same_losses(
    slurm: SlurmCluster, local_runs: tuple[Path, Path], tmp_path: Path
) -> None:
    walked, here = local_runs
    folder, shown = copy_folder(walked, tmp_path / "demo"), tmp_path / "shown"
    only = ["--config", ONE_NODE, "--retries", "0", "--allowed-rules", "train_model", "--forcerun", "train_model"]
    with shown.open("w") as output:
        running = subprocess.Popen(call(folder, *only, "--", FULL, train_model=LIMITED), stdout=output, stderr=output)

    def is_told() -> bool:
        logs = folder.glob(".snakemake/slurm_logs/train_model/*.log")
        return any("SIGTERM: to save a checkpoint" in log.read_text() for log in logs)

    try:
        wait_for("it trains", lambda: made(folder) > PAUSED_AFTER or is_told(), 120)
        paused = trainers(folder)
        send(signal.SIGSTOP, paused)
        wait_for("its stage is told", is_told, 120)
        send(signal.SIGCONT, paused)
        wait_for("its job is in the queue again", lambda: only_job(slurm, folder)["Restarts"] == "1", 120)
        limit = only_job(slurm, folder)["TimeLimit"]
        # On a machine at work a start of two minutes makes a few steps: once is enough here.
        slurm.run("scontrol", "update", f"JobId={only_job(slurm, folder)['JobId']}", "Partition=gpu", "TimeLimit=30")
        assert running.wait(300) == 0, shown.read_text()[-6000:]
    finally:
        running.kill()
        running.wait()
    job = only_job(slurm, folder)
    assert (job["Restarts"], limit) == ("1", "00:02:00")
    said = shown.read_text()
    assert f"train_model run={RUN}: job {job['JobId']} is in the queue again, and resumes; this uses no retry" in said
    assert "Error in rule" not in said
    log = (folder / "logs" / "train_model" / f"{RUN}.log").read_text()
    assert re.search(rf"resuming from step \d+ of {STEPS}", log)
    assert losses(folder / FULL / "progress.jsonl") == losses(here / FULL / "progress.jsonl")
    weights = Path(FULL, "adapter_model.safetensors")
    assert sha256_of(folder / weights) == sha256_of(here / weights)
