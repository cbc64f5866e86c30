"""Trainings on Slurm that lose their place, their node or their Snakemake: each saves, and resumes."""

import json
import signal
import time
from pathlib import Path

import psutil
import pytest

from slurm.slurm_cluster import NODES, SlurmCluster
from slurm.slurm_workflow import Call, call
from vlmflow.core.child_programs import OTHER_NODE, PORT
from vlmflow.remote.slurm.in_job import PORTS
from vlmflow.remote.slurm.queue import QueuedJob
from workflow_runs import RUN, copy_folder, snakemake, words_of

pytestmark = pytest.mark.slow

STEPS, EVERY = 36, 6
"""Steps of a training, and after how many it saves a checkpoint."""

ENDED = ("CANCELLED", "FAILED")

WARNING = 60
"""Seconds that it has to save when Snakemake ends."""

FULL, SMOKE = f"checkpoints/{RUN}/full", f"checkpoints/{RUN}/smoke"
TRAIN = {"max_steps": STEPS, "checkpoint_steps": EVERY, "evaluation_steps": EVERY, "learning_rate": 5e-3}


@pytest.fixture(scope="module")
def gated(fresh_demo: Path) -> Path:
    """Return a folder in which the demo ran on this machine up to the open gate of its smoke run."""
    folder = copy_folder(fresh_demo, fresh_demo.with_name("gated"))
    snakemake(folder, "--", SMOKE)
    return folder


@pytest.fixture
def folder(gated: Path, tmp_path: Path) -> Path:
    """Return a folder in which only the training is due."""
    return copy_folder(gated, tmp_path / "demo")


def train(
    folder: Path, *words: str, target: str = FULL, partition: str = "gpu", gpu: int = 0, **settings: object
) -> Call:
    """Start Snakemake for a training. gpu: of its job, whatever it trains on. settings: of the run, besides TRAIN."""
    runs = json.dumps({RUN: {"train": TRAIN} | settings})
    rule = "train_smoke" if target == SMOKE else "train_model"
    asked = {rule: {"slurm_partition": partition, "gpu": gpu, "warning_seconds": WARNING}}
    own = ["--config", f"runs={runs}", "--allowed-rules", rule]
    return Call(folder, call(folder, *own, *words, "--", target, **asked))


def progress(folder: Path) -> list[Path]:
    """Return the files with the progress of each training of the folder, the last that changed at the end."""
    return sorted(folder.glob(f"stores/runs/{RUN}/full/*/progress.jsonl"), key=lambda file: file.stat().st_mtime)


def steps(folder: Path) -> list[int]:
    """Return the steps that trainers have logged in the newest training of the folder, also those trained twice."""
    files = progress(folder)
    lines = [json.loads(line) for line in files[-1].read_text().splitlines() if line.endswith("}")] if files else []
    return [line["step"] for line in lines if "loss" in line]


def trains(run: Call, beyond: int = EVERY + 1) -> QueuedJob:
    """Wait until a training has passed a step, after its first checkpoint; return its job."""
    run.until(f"it trains beyond step {beyond}", lambda: max(steps(run.folder), default=0) > beyond, 120)
    return run.jobs("train_model")[-1]


def resumed_at(folder: Path) -> int:
    """Return where the last start of the training went on."""
    said = (folder / "logs" / "train_model" / f"{RUN}.log").read_text()
    _, there, after = said.rpartition("resuming from step ")
    return int(after.split()[0]) if there else 0


@pytest.mark.parametrize("partition", ["gpu", "cpu"])
def test_a_preempted_training_resumes(slurm: SlurmCluster, folder: Path, partition: str) -> None:
    """GraceTime passes between signal and end in the partition `gpu`; in `cpu` there is none, only KillWait."""
    run = train(folder, partition=partition)
    job = trains(run)
    slurm.submit("sleep 1000", "--partition=urgent", "--exclusive", f"--nodelist={job.where}")
    said = run.end(limit=240)
    assert steps(folder) == list(range(1, STEPS + 1)), "no step was trained twice"
    assert resumed_at(folder) > EVERY
    assert [one.id for one in run.jobs("train_model")] == [job.id]
    assert slurm.job(job.id)["Restarts"] == "1"
    assert "is in the queue again, and resumes; this uses no retry" in said
    assert "Trying to restart job" not in said


def test_the_training_of_a_lost_node_resumes_on_another(slurm: SlurmCluster, folder: Path) -> None:
    run = train(folder)
    job = trains(run)
    slurm.kill_node(job.where)
    said = run.end(limit=240)
    assert resumed_at(folder) >= EVERY
    assert [one.id for one in run.jobs("train_model")] == [job.id]
    now = slurm.job(job.id)
    assert (now["Restarts"], {now["NodeList"], job.where}) == ("1", set(NODES))
    assert "Trying to restart job" not in said


@pytest.mark.parametrize("saves", [False, True])
def test_a_cancelled_training_ends(slurm: SlurmCluster, folder: Path, saves: bool) -> None:
    """It does not come again, also if it was saving at its limit when it was cancelled."""
    run = train(folder)
    job = trains(run, beyond=2)
    if saves:
        slurm.run("scancel", "--signal=TERM", job.id)
    slurm.run("scancel", job.id)
    said = run.end(1)
    assert "it was cancelled (scancel)" in said
    assert "This job is not retried" in said
    assert [(one.id, one.state) for one in run.jobs("train_model")] == [(job.id, "CANCELLED")]
    assert slurm.job(job.id)["Restarts"] == "0"


def test_a_killed_snakemake_leaves_a_training_that_others_end(slurm: SlurmCluster, folder: Path) -> None:
    """One with another learning rate ends its job; that one is told to end; a third resumes where it was."""
    killed = train(folder)
    first = trains(killed, beyond=2)
    killed.process.kill()
    killed.process.wait()
    other = {"train": TRAIN | {"learning_rate": 4e-3}}
    told = train(folder, **other)
    told.wait_for(f"ending job {first.id} of an earlier call, which makes it otherwise")
    told.until("another job trains", lambda: len(progress(folder)) == 2, 120)
    assert slurm.job(first.id)["JobState"] in ENDED
    second = trains(told)
    begun = time.monotonic()
    told.process.send_signal(signal.SIGTERM)
    said = told.end(1)
    assert time.monotonic() - begun < WARNING
    assert "1 job of trainers: to save a checkpoint and end" in said
    reached = max(steps(folder))
    assert slurm.job(second.id)["JobState"] in ENDED
    third = train(folder, **other)
    third.end()
    assert resumed_at(folder) == reached
    assert steps(folder) == list(range(1, STEPS + 1)), "no step was trained twice"
    assert len(third.jobs("train_model")) == 3


def test_two_trainings_share_a_node(slurm: SlurmCluster, folder: Path, gated: Path, tmp_path: Path) -> None:
    """Each sees one GPU, which has the number 0 for both; neither waits for the other's."""
    slurm.submit("sleep 1000", "--exclusive", "--nodelist=node-b", "--time=10")
    runs = [train(one, gpu=1, processes=1) for one in (folder, copy_folder(gated, tmp_path / "other"))]
    for run in runs:
        trains(run, beyond=2)
    now = [job for run in runs for job in run.jobs("train_model")]
    assert [(job.state, job.where) for job in now] == [("RUNNING", "node-a")] * 2
    stages = [one for one in psutil.process_iter() if ".train_model.py" in words_of(one)]
    assert [one.environ()["CUDA_VISIBLE_DEVICES"] for one in stages if "python" in one.name()] == ["0", "0"]
    for run in runs:
        run.process.send_signal(signal.SIGTERM)
    for run in runs:
        run.end(1)


def started(*words: str) -> bool:
    """Return whether a process runs whose command line has all of these words."""
    return any(all(word in line for word in words) for line in map(words_of, psutil.process_iter()))


def test_a_training_on_two_nodes(slurm: SlurmCluster, folder: Path) -> None:
    """It is requeued in the middle: each start has a name of its own, and the job its own port."""
    run = train(folder, "--max-threads", "1", "--force", target=SMOKE, nodes=2, processes=1)
    run.until("the other node serves", lambda: started(OTHER_NODE))
    job = run.jobs("train_smoke")[-1]
    port = f":{PORT + int(job.id) % PORTS} "
    run.until("both train", lambda: all(started(port, f"--node_rank={node} ") for node in (0, 1)))
    assert started(OTHER_NODE, f" slurm-{job.id}-0 1 ")
    slurm.run("scontrol", "requeue", job.id)
    run.until("the other node serves again", lambda: started(OTHER_NODE, f" slurm-{job.id}-1 1 "))
    run.until("both train", lambda: all(started(port, f"--node_rank={node} ") for node in (0, 1)))
    run.end()
    assert json.loads((folder / SMOKE / "gate.json").read_text())["passed"]
    assert not started(OTHER_NODE)
