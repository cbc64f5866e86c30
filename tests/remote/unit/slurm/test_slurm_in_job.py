"""Whether a job that was told to end comes again: what it asks Slurm, with commands that answer as Slurm's do."""

import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slurm_commands import SlurmCommands
from vlmflow.remote.slurm import in_job
from workflow_runs import ROOT

WARNING = 180
NEAR, FAR = f"RUNNING|{(WARNING + 59) // 60}:59\n", "RUNNING|1-00:00:00\n"
"""Answers of squeue: less time is left than when a job is told of its limit, or more."""

JOB = """
import os, signal, sys, time
from types import SimpleNamespace
from vlmflow.harness.patches import on_sigterm
from vlmflow.remote.slurm import in_job
in_job.UNTIL_REQUEUED = 0
job = SimpleNamespace(resources={"warning_seconds": 180})
in_job.install(SimpleNamespace(dag=SimpleNamespace(jobs=[job]), scheduler=None), on_sigterm)
if sys.argv[1:] == ["told"]:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(20)
sys.exit(1)
"""
"""The Snakemake of a job, which ends before it has begun: by itself, or because it is told."""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SlurmCommands:
    monkeypatch.setattr(in_job, "UNTIL_REQUEUED", 0)
    commands = SlurmCommands(tmp_path, monkeypatch)
    commands.answer("scontrol")
    return commands


@pytest.mark.parametrize(
    ("answer", "saved", "restarts", "why"),
    [
        (NEAR, True, 0, ""),
        (NEAR, True, 500, ""),
        (NEAR, False, 0, "it saved nothing within its time limit: raise its runtime, or warning_seconds"),
        (FAR, False, 0, ""),
        ("RUNNING|UNLIMITED\n", False, 19, ""),
        (FAR, False, 20, "it lost its place 20 times and saved nothing"),
        ("COMPLETING|1:00\n", True, 0, "it was COMPLETING after the signal"),
        ("CANCELLED|1:00\n", True, 0, "it was CANCELLED after the signal"),
        ("", True, 0, "Slurm does not let it come again: "),
        ("RUNNING|1:00\nRUNNING|1:00\n", True, 0, "Slurm does not let it come again: "),
    ],
    ids=[
        *("saved", "saved every time", "saved nothing at its limit", "lost its place", "no limit"),
        *("lost its place for ever", "cancelled", "gone", "no answer", "two answers"),
    ],
)
def test_a_job_comes_again_if_it_saved_or_lost_its_place(
    slurm: SlurmCommands, monkeypatch: pytest.MonkeyPatch, answer: str, saved: bool, restarts: int, why: str
) -> None:
    monkeypatch.setenv("SLURM_RESTART_COUNT", str(restarts))
    slurm.answer("squeue", answer)
    said = in_job.requeue("7", saved, WARNING)
    assert said == why if not why.endswith(" ") else said.startswith(why)
    assert slurm.calls("scontrol") == ([] if why else ["scontrol requeue 7"])


@pytest.mark.parametrize("command", ["squeue", "scontrol"])
def test_an_outage_is_told(slurm: SlurmCommands, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    slurm.answer("squeue", FAR)
    slurm.answer(command, fails="slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
    said = in_job.requeue("7", True, WARNING)
    assert said.startswith(f"Slurm does not let it come again: {command}: slurm_load_jobs error: Unable to contact")


@pytest.mark.parametrize(
    ("words", "answer", "calls", "why"),
    [
        ([], FAR, [], None),
        (["told"], FAR, ["scontrol requeue 7"], None),
        (["told"], NEAR, [], "it saved nothing within its time limit: raise its runtime, or warning_seconds"),
    ],
    ids=["a failure of its own", "told while it starts", "told while it starts, at its limit"],
)
def test_only_a_job_that_was_told_asks_to_come_again(
    slurm: SlurmCommands, tmp_path: Path, words: list[str], answer: str, calls: list[str], why: str | None
) -> None:
    """It reads no verdict of an earlier start."""
    verdict = tmp_path / "ends" / "7.json"
    verdict.parent.mkdir()
    verdict.write_text('{"saved": true}')
    slurm.answer("squeue", answer)
    own = {"SLURM_JOB_ID": "7", in_job.ENDS: str(verdict.parent), "PYTHONPATH": str(ROOT / "scripts")}
    done = subprocess.run(
        [sys.executable, "-c", JOB, *words], env=os.environ | own, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert [call for call in slurm.calls("scontrol") if "show config" not in call] == calls  # the plugin's import
    assert (json.loads(verdict.read_text()) if verdict.exists() else None) == (why and {"again": False, "why": why})
    assert done.stderr == (f"{why}\n" if why else "")


STAGE = """
import signal, subprocess, sys, threading, time
from pathlib import Path
folder, child = Path(sys.argv[1]), None
def save(*given):
    print("saves", flush=True)
    threading.Timer(1, child.kill).start()
def wait_for(name):
    while not (folder / name).exists():
        time.sleep(0.01)
wait_for("train")
before = signal.signal(signal.SIGTERM, save)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(40)", "torch.distributed.run"])
child.wait()
signal.signal(signal.SIGTERM, before)
print("trained", flush=True)
wait_for("end")
print("ends well", flush=True)
"""
"""A stage that saves when it is told, while it has trainers; at other times it would just end."""


def test_a_stage_is_told_once_its_trainers_run(tmp_path: Path) -> None:
    """Behind its shell; and not before, nor when their result is being put in place."""
    tells = f"import sys; sys.path.insert(0, {str(ROOT / 'scripts')!r}); from vlmflow.remote.slurm import in_job\n"
    tells += "import subprocess, threading\nthreading.Thread(target=in_job.tell_trainers, daemon=True).start()\n"
    tells += "print(subprocess.run(['sh', '-c', sys.argv[1] + '; true']).returncode)"
    (tmp_path / "stage.py").write_text(STAGE)
    words = f"{sys.executable} {tmp_path}/stage.py {tmp_path}"
    with subprocess.Popen([sys.executable, "-c", tells, words], stdout=subprocess.PIPE, text=True) as snakemake:
        assert snakemake.stdout is not None
        time.sleep(1.5)
        assert snakemake.poll() is None
        (tmp_path / "train").touch()
        assert select.select([snakemake.stdout], [], [], 30)[0]
        assert [snakemake.stdout.readline() for _ in range(2)] == ["saves\n", "trained\n"]
        time.sleep(0.5)
        (tmp_path / "end").touch()
        assert snakemake.stdout.read() == "ends well\n0\n"
