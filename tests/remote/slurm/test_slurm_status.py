"""`vlmflow status` and `vlmflow doctor --on slurm` on a login node."""

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.shell import wait_for
from slurm.slurm_cluster import SlurmCluster
from vlmflow.remote.slurm.waiting import will_not_start
from workflow_runs import ROOT, vlmflow

PROGRESS = "mine · step 4/10 · loss 3.000 · 2.00 s/step · 0:12 left"
OURS = "--comment=vlmflow folder key identity"
LONG = f"echo '{PROGRESS}'; echo a warning; sleep 60"


def status(slurm: SlurmCluster, folder: Path) -> list[str]:
    """Return what it prints: of this machine, then of Slurm."""
    habits = {"SQUEUE_PARTITION": "urgent", "SLURM_TIME_FORMAT": "relative"}
    own = {**environment(slurm), **habits, "KUBECONFIG": str(folder / "none")}
    words = vlmflow("status", "--namespace", "any", "--directory", folder)
    done = subprocess.run(words, env=own, cwd=folder, capture_output=True, text=True, check=False)
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


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """Return a working directory with what the demo's plan looks for, and a profile for nodes of two cores."""
    (tmp_path / "sample" / "pictures").mkdir(parents=True)
    (tmp_path / "tiny-model").mkdir()
    for file in ("tiny-model/model.safetensors", "sample/FIRE-train-100K.json", "sample/FIRE-test.json"):
        (tmp_path / file).touch()
    profile = yaml.safe_load((ROOT / "profiles/slurm/config.yaml").read_text()) | {"max-threads": 2}
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.yaml").write_text(yaml.safe_dump(profile))
    return tmp_path


def call(work: Path, *words: str) -> list[str]:
    files = [str(ROOT / "profiles/demo/run.yaml"), str(work / "changes.yaml")]
    own = ["--on", "slurm", "--json", "--profile", str(work / "mine"), "--directory", str(work)]
    also = ["--also", files[1], "--run", "qwen3vl-fire"]
    return vlmflow("doctor", files[0], *also, *own, *words)


def environment(cluster: SlurmCluster) -> dict[str, str]:
    return {**cluster.environment, "PYTHONPATH": str(ROOT / "scripts"), "HF_ENDPOINT": "http://127.0.0.1:9"}


def probes(cluster: SlurmCluster) -> int:
    """Return how many jobs of a doctor wait or run."""
    return cluster.run("squeue", "--noheader", "--format=%j", "--states=PENDING,RUNNING").count("vlmflow-doctor")


def doctor(cluster: SlurmCluster, work: Path, *words: str, **changes: Any) -> dict[str, dict[str, str]]:
    """Return its findings by what they are of. changes: of the configuration."""
    (work / "changes.yaml").write_text(yaml.safe_dump(changes))
    done = subprocess.run(call(work, *words), env=environment(cluster), capture_output=True, text=True, check=False)
    assert done.stderr == ""
    said = json.loads(done.stdout)
    assert done.returncode == (0 if said["ready"] else 1)
    assert probes(cluster) == 0
    assert list(work.glob(".doctor-*")) == []
    return {finding["what"]: finding for finding in said["checks"]}


def faults(findings: dict[str, dict[str, str]], state: str = "fail") -> dict[str, str]:
    return {what: finding["found"] for what, finding in findings.items() if finding["state"] == state}


def test_a_cluster_that_has_everything_is_ready(slurm: SlurmCluster, work: Path) -> None:
    findings = doctor(slurm, work, runs={"qwen3vl-fire": {"device": "cuda", "resources": {"train_runtime": 600}}})
    assert faults(findings) == {}
    assert list(faults(findings, "warn")) == ["KillWait", "preemption in gpu"]
    found = {what: finding["found"] for what, finding in findings.items()}
    assert found["partition gpu"] == "120 minutes at most; 2 nodes of 2 cores, 16 GB, 2 GPUs"
    assert found["time of train_model"].endswith("6 jobs, one after the other, each of which resumes the training")
    assert found["sbatch --test-only"] == "Slurm would take every job of these runs"
    for partition in ("cpu", "gpu"):
        first, second = found[f"jobs in {partition}"].split()[0], found[f"two nodes of {partition}"].split()[0]
        assert {first, second} == {"node-a", "node-b"}
        assert found[f"signals in {partition}"] == f"a step on {second} gets SIGTERM"


def test_what_a_cluster_lacks_is_named(slurm: SlurmCluster, work: Path) -> None:
    """One node has a disk of its own in the place of a store; stages fetch in jobs; a GPU is of another kind."""
    own = work / "own"
    own.mkdir()
    slurm.hosts["node-b"].run("mount", "-t", "tmpfs", "own", own)
    try:
        findings = doctor(
            slurm,
            work,
            stores={"runs": str(own)},
            slurm={"here": [], "gpu_model": "a100"},
            models={"tiny": {"source": "hf://Qwen/Qwen3-VL-2B-Instruct"}},
            runs={"qwen3vl-fire": {"device": "cuda"}},
        )
    finally:
        slurm.hosts["node-b"].run("umount", own)
    wrong = faults(findings)
    assert set(wrong) == {"run qwen3vl-fire", "two nodes of cpu", "two nodes of gpu", "hub from cpu"}
    assert "2 GPUs of a100 on one node; its nodes have none" in wrong["run qwen3vl-fire"]
    assert "No such file or directory" in wrong["two nodes of gpu"]
    assert wrong["two nodes of gpu"].startswith("stores.runs, from node-")
    assert "Connection refused" in wrong["hub from cpu"]


def test_a_job_that_waits_is_told_and_ends_with_ctrl_c(slurm: SlurmCluster, work: Path) -> None:
    for node in ("node-a", "node-b"):
        slurm.wait_for_job(slurm.submit("sleep 60", "--exclusive", f"--nodelist={node}"), "RUNNING")
    waiting = faults(doctor(slurm, work, "--patience", "1"), "warn")
    assert waiting["jobs in cpu"].startswith("not seen from inside: it still waits after 1 s: ")
    with subprocess.Popen(call(work), env=environment(slurm), stdout=subprocess.DEVNULL) as running:
        wait_for("its jobs wait", lambda: probes(slurm) == 2)
        running.send_signal(signal.SIGINT)
        assert running.wait(30) == 130
    assert probes(slurm) == 0
    assert list(work.glob(".doctor-*")) == []
