"""The trainings that run on this machine: folders, newest figures, and `vlmflow status` without a cluster."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vlmflow.config.run_settings import TrainSettings
from vlmflow.core.errors import PassingError, VlmflowError
from vlmflow.in_trainer.messages import STATE, Begin, End, Event, Log, as_line
from vlmflow.supervisor.progress import Newest, doing, local_runs, report_line
from vlmflow.supervisor.run_folder import RunFolder
from vlmflow.supervisor.watch import end_of_whole_lines
from workflow_runs import ROOT, vlmflow

SCRIPTS = ROOT / "scripts"

HOLD = """
import subprocess, sys, time
from pathlib import Path
from vlmflow.supervisor.run_folder import RunFolder
with RunFolder(Path(sys.argv[1])).held({}) as lock:
    child = subprocess.Popen(["sleep", "60"], pass_fds=[lock])
    print(child.pid, flush=True)
    time.sleep(60)
"""


def test_no_two_trainers_hold_one_folder(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    refused = pytest.raises(VlmflowError, match=r"process \d+ on .* is training here")
    with folder.held({"a": 1}), refused, folder.held({"a": 1}, patience=0):
        pass
    with folder.held({"a": 1}, patience=0):
        pass


def test_an_orphan_of_a_killed_trainer_keeps_the_folder(tmp_path: Path) -> None:
    """The lock is inherited: it is held while any child that inherited it lives, and free when the last has ended."""
    folder = RunFolder(tmp_path / "run")
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder.path)],
        stdout=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": SCRIPTS},
    )
    orphan = int(holder.stdout.readline())
    holder.kill()
    holder.wait()
    with pytest.raises(VlmflowError, match=f"process {holder.pid} on"), folder.held({}, patience=0):
        pass
    subprocess.run(["kill", str(orphan)], check=True)
    with folder.held({}, patience=5):
        pass


@pytest.mark.parametrize(("error", "stays"), [(VlmflowError, False), (PassingError, True)])
def test_a_folder_is_set_aside_where_its_input_changed_and_not_where_a_disk_failed(
    tmp_path: Path, error: type[VlmflowError], stays: bool
) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    with pytest.raises(error) as raised, folder.set_aside_where_refused("train_model x"):
        raise error("1 of 2 pictures cannot be read", "check the disk")
    assert folder.path.exists() is stays
    assert ("the input changed" in str(raised.value)) is not stays


def test_the_name_of_a_holder_moves_no_cursor_and_is_short(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with folder.held({}):
        (folder.path / "lock").write_bytes(b"process 1 on \x1b]0;title\x07\xff" + b"x" * 10_000)
        name = folder.holder()
        assert name.startswith("process 1 on �]0;title��xxx")
        assert len(name) <= 200
        with pytest.raises(PassingError) as raised, folder.held({}, patience=0):
            pass
    assert f"{name} is training here" in raised.value.cause


SETTINGS = TrainSettings(checkpoint_steps=2, evaluation_steps=4)
BEGIN = Begin(0, 10, 0, 1, "NOT_DISTRIBUTED", "cpu")


def step(number: int, loss: float = 3.0) -> Log:
    return Log(2.0 * number, number, 10, 50 * number, loss=loss)


def evaluation(number: int, loss: float = 4.0) -> Log:
    return Log(2.0 * number + 1, number, 10, 50 * number, eval_loss=loss)


def test_progress_shows_speed_and_time_left_of_this_session() -> None:
    newest = Newest()
    newest.take(Begin(10, 20, 0, 1, "NOT_DISTRIBUTED", "cpu"))
    assert report_line(newest) == ""
    newest.take(Log(2.0, 11, 20, 50, loss=4.2))
    newest.take(Log(4.0, 12, 20, 99, eval_loss=5.0))
    assert report_line(newest) == "step 12/20 · loss 4.200 · val 5.000 · 2.00 s/step · 0:16 left"


def test_a_repeated_evaluation_counts_once_and_its_time_twice() -> None:
    first = [BEGIN, *map(step, range(1, 5)), evaluation(4, 5.0)]
    again = [Begin(2, 10, 100, 1, "NOT_DISTRIBUTED", "cpu"), Log(3.0, 3, 10, 150, loss=3.0)]
    newest = Newest.of([*first, *again])
    assert newest.eval_losses == {}
    assert (newest.sessions, newest.step, newest.seconds, newest.tokens) == (2, 3, 12.0, 250)
    assert newest.seconds_left == 7 * 3.0


@pytest.mark.parametrize(
    ("events", "saved", "found"),
    [
        ([BEGIN], [], "training"),
        ([BEGIN, step(1)], [], "training"),
        ([BEGIN, step(2)], [], "saving"),
        ([BEGIN, step(2)], [2], "training"),
        ([BEGIN, step(4)], [2], "evaluating"),
        ([BEGIN, step(4), evaluation(4)], [2], "saving"),
        ([BEGIN, step(4), evaluation(4)], [2, 4], "training"),
        ([BEGIN, step(10)], [], "evaluating"),
        ([BEGIN, step(10), evaluation(10)], [], "saving"),
        ([BEGIN, step(3), End(3, [])], [], "saving"),
        ([Begin(4, 10, 200, 1, "NOT_DISTRIBUTED", "cpu")], [4], "evaluating"),
    ],
)
def test_what_running_trainers_do(events: list[Event], saved: list[int], found: str, tmp_path: Path) -> None:
    for number in saved:
        (tmp_path / f"checkpoint-{number}").mkdir()
        (tmp_path / f"checkpoint-{number}" / STATE).touch()
    newest = Newest.of(events)
    assert doing(newest, SETTINGS, tmp_path, runs=True) == found
    assert doing(newest, SETTINGS, tmp_path, runs=True, begun=False) == "starting"


@pytest.mark.parametrize(
    ("events", "found"),
    [
        ([], "interrupted"),
        ([BEGIN, step(10)], "interrupted"),
        ([BEGIN, step(10), evaluation(10)], "ended"),
        ([BEGIN, step(4), evaluation(4), step(5), End(5, [])], "interrupted"),
        ([BEGIN, step(4), evaluation(4, 3.0), step(8), evaluation(8, 3.0), End(8, [])], "ended"),
    ],
)
def test_whether_a_training_ended(events: list[Event], found: str, tmp_path: Path) -> None:
    settings = SETTINGS.model_copy(update={"early_stop_after": 1})
    assert doing(Newest.of(events), settings, tmp_path, runs=False) == found


SETTINGS_AS_DATA = TrainSettings(checkpoint_steps=2, evaluation_steps=4).model_dump(mode="json")
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
    with folder.held({"settings": SETTINGS_AS_DATA}):
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
    with folder.held({"settings": SETTINGS_AS_DATA}):
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
    with folder.held({}), other.held({"settings": SETTINGS_AS_DATA}):
        (folder.path / "job.json").write_bytes(content if isinstance(content, bytes) else content.encode())
        runs = local_runs(tmp_path / "stores" / "runs")
    assert [(run.stage, run.doing) for run in runs] == [("full", "starting"), ("smoke", "starting")]


@pytest.mark.lengthy
def test_status_shows_them_on_a_machine_without_a_cluster(folder: RunFolder, tmp_path: Path) -> None:
    def status() -> str:
        words = vlmflow("status", "--directory", tmp_path)
        environment = {**os.environ, "KUBECONFIG": str(tmp_path / "none"), "PATH": str(tmp_path)}  # no squeue either
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    store = tmp_path / "stores" / "runs"
    assert status().startswith(f"this machine trains nothing in {store}\nno Kubernetes cluster is configured: ")
    with folder.held({"settings": SETTINGS_AS_DATA}):
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
