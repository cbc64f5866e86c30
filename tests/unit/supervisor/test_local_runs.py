"""The trainings that run on this machine, and `make status` on one without a cluster."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vlmflow.config.run_settings import TrainSettings
from vlmflow.in_trainer.messages import Begin, Event, Log, as_line
from vlmflow.supervisor.progress import local_runs
from vlmflow.supervisor.run_folder import RunFolder
from vlmflow.supervisor.watch import end_of_whole_lines
from workflow_runs import ROOT

SETTINGS = TrainSettings(checkpoint_steps=2, evaluation_steps=4).model_dump(mode="json")
EVENTS = [Begin(0, 10, 0, 1, "NOT_DISTRIBUTED", "cpu"), Log(8.0, 4, 10, 100, loss=3.0)]


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """The run folder of a training in the working directory `tmp_path`."""
    return RunFolder(tmp_path / "stores" / "runs" / "mine" / "full" / "digest")


def write(folder: RunFolder, events: list[Event]) -> None:
    folder.progress.write_text("".join(map(as_line, events)))
    os.utime(folder.progress, (time.time() + 1, time.time() + 1))


def test_a_training_is_found_while_a_process_holds_its_folder(folder: RunFolder, tmp_path: Path) -> None:
    store = tmp_path / "stores" / "runs"
    assert local_runs(store) == []
    with folder.held({"settings": SETTINGS}):
        (run,) = local_runs(store)
        assert (run.run, run.stage, run.doing, run.newest.step) == ("mine", "full", "starting", 0)
        assert run.holder.startswith(f"process {os.getpid()} on ")
        assert abs(time.time() - run.since) < 60
        write(folder, [])
        assert local_runs(store)[0].doing == "starting"
        write(folder, EVENTS)
        (run,) = local_runs(store)
        assert (run.doing, run.newest.step, run.newest.target) == ("evaluating", 4, 10)
    assert local_runs(store) == []
    time.sleep(0.01)
    os.utime(folder.progress, (1, 1))
    with folder.held({"settings": SETTINGS}):
        (run,) = local_runs(store)
        assert run.doing == "starting", "the events are those of the session before"
    with folder.held({}):
        assert len(local_runs(store)) == 1, "the look takes no lock away"
        lock = folder.path / "lock"
        lock.write_text("process 1 on another-node")
        assert local_runs(store) == []
        lock.write_text("")
        assert [run.holder for run in local_runs(store)] == ["another process"]


def test_settings_of_another_version_hide_no_training(folder: RunFolder, tmp_path: Path) -> None:
    with folder.held({"settings": {"no such": "key"}}):
        write(folder, EVENTS)
        (run,) = local_runs(tmp_path / "stores" / "runs")
        assert (run.doing, run.newest.step) == ("training", 4)


@pytest.mark.parametrize("content", ["[]", "null", "[" * 100_000, "{", '{"settings": []}', b"\xff"])
def test_a_damaged_job_file_hides_no_training(folder: RunFolder, tmp_path: Path, content: str | bytes) -> None:
    other = RunFolder(folder.path.parents[1] / "smoke" / "digest")
    with folder.held({}), other.held({"settings": SETTINGS}):
        (folder.path / "job.json").write_bytes(content if isinstance(content, bytes) else content.encode())
        runs = local_runs(tmp_path / "stores" / "runs")
    assert [(run.stage, run.doing) for run in runs] == [("full", "starting"), ("smoke", "starting")]


@pytest.mark.lengthy
def test_status_shows_them_on_a_machine_without_a_cluster(folder: RunFolder, tmp_path: Path) -> None:
    def status() -> str:
        words = [sys.executable, ROOT / "scripts" / "vlmflow" / "tools" / "status.py", "any", "--directory", tmp_path]
        environment = {**os.environ, "KUBECONFIG": str(tmp_path / "none"), "PATH": str(tmp_path)}  # no squeue either
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    store = tmp_path / "stores" / "runs"
    assert status().startswith(f"this machine trains nothing in {store}\nno Kubernetes cluster is configured: ")
    with folder.held({"settings": SETTINGS}):
        write(folder, EVENTS)
        first, second, *_ = status().splitlines()
    assert first.split("  ")[:2] == ["mine full", "evaluating"]
    assert first.endswith("step 4/10 · loss 3.000 · 2.00 s/step · 0:12 left")
    assert second.startswith("no Kubernetes cluster is configured")


def test_an_unfinished_line_is_cut_and_a_whole_file_keeps_its_time(tmp_path: Path) -> None:
    """Its time shows whether a session has written an event."""
    progress = tmp_path / "progress.jsonl"
    progress.write_text("{}\n")
    os.utime(progress, (1, 1))
    assert end_of_whole_lines(progress) == 3
    assert progress.stat().st_mtime == 1
