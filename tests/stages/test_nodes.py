"""Trainings on several nodes; without a cluster they are processes of this machine."""

import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tiny_trainings import Tiny, losses_of, train_and_kill
from trainer_faults import make_fault
from vlmflow.core.errors import PassingError, counted
from vlmflow.core.files import sha256_of
from vlmflow.supervisor import launch
from vlmflow.supervisor.group import group_of
from vlmflow.supervisor.run_folder import RunFolder
from vlmflow.supervisor.train import Trained, train
from vlmflow.swift.arguments import Training
from workflow_runs import ROOT, words_of

STEPS = 6


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Tiny.write(tmp_path_factory.mktemp("tiny"), vision=True)


@pytest.fixture(scope="module")
def two(tiny: Tiny) -> Training:
    """A training on two nodes of one process each."""
    one = tiny.training(processes=2, max_steps=STEPS, checkpoint_steps=2, evaluation_steps=2)
    return replace(one, nodes=2, processes=1)


@pytest.fixture(scope="module")
def alone(two: Training, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights that one node of two processes trains."""
    one = replace(two, nodes=1, processes=2)
    assert one.digest() == two.digest(), "a training may move to other nodes"
    return weights(train(one, tmp_path_factory.mktemp("one"), 2, "train_model r"))


def weights(trained: Trained) -> str:
    return sha256_of(trained.last.folder / "adapter_model.safetensors")


def runs_in(folder: Path) -> Path:
    """Return a folder for run folders where another node looks for them: by run and stage."""
    return folder / "r" / "full"


def test_a_killed_training_of_two_nodes_ends_with_the_weights_of_one_node(
    two: Training, alone: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runs = runs_in(tmp_path)
    train_and_kill(two, runs, 3)
    left = [*(runs / two.digest()).glob("launch-*")]
    with caplog.at_level("INFO", "vlmflow"):
        trained = train(two, runs, 2, "train_model r")
    assert weights(trained) == alone
    steps = [step for step, _ in losses_of(two, runs)]
    last = steps.index(3, 3)  # the kill may come a step later
    assert steps == [*range(1, last + 1), 3, 4, 5, 6]
    assert f"; lost since then, and trained again: {counted(last - 2, 'step')}" in caplog.text
    assert left == [] == [*trained.folder.path.glob("launch-*")], "nothing is left"
    assert launch.log_of(trained.folder, 1).stat().st_size


def test_a_fault_on_another_node_is_named_and_resumed(
    two: Training, alone: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make_fault(monkeypatch, tmp_path, "out of memory", "step", 4, rank=1)
    trained = train(two, runs_in(tmp_path), 2, "train_model r")
    assert weights(trained) == alone
    (said,) = (record.getMessage() for record in caplog.records if "resuming once" in record.getMessage())
    assert "CUDA out of memory. Tried to allocate 2.00 GiB. (after step 3): resuming once from step 2" in said


@pytest.mark.usefixtures("fresh_programs")
@pytest.mark.slow  # the tests on a cluster delete a pod
def test_a_node_that_must_end_lets_all_ranks_save(two: Training, alone: str, tmp_path: Path) -> None:
    """As when a pod is deleted: its program gets SIGTERM, and its trainers tell the others."""
    runs = runs_in(tmp_path)

    def end_node_1() -> None:
        while not any(step >= 2 for step, _ in losses_of(two, runs)):
            time.sleep(0.01)
        (node,) = (each for each in psutil.Process().children() if "other_node" in words_of(each))
        node.send_signal(signal.SIGTERM)

    ender = threading.Thread(target=end_node_1)
    ender.start()
    with pytest.raises(PassingError, match=r"interrupted, with step [2-5] of 6"):
        train(two, runs, 2, "train_model r")
    ender.join()
    assert weights(train(two, runs, 2, "train_model r")) == alone
    assert [step for step, _ in losses_of(two, runs)] == [1, 2, 3, 4, 5, 6], "no step is lost"


def test_a_node_of_another_attempt_joins_nothing(two: Training, tmp_path: Path) -> None:
    folder = RunFolder(runs_in(tmp_path) / two.digest())
    words = ["-m", "vlmflow.supervisor.other_node", str(tmp_path / "r"), "an-earlier-attempt", "1", "1"]
    env = {"PYTHONPATH": str(ROOT / "scripts")}
    late = subprocess.Popen([sys.executable, *words], env=env, stderr=subprocess.PIPE, text=True)
    assert "waiting for node 0 of attempt an-earlier-attempt" in late.stderr.readline()
    with folder.held(two.describe()), group_of(two, folder, 2) as group:
        group.begin(None)
        begun = time.monotonic()
        while not [*folder.path.glob("launch-*.node-*")]:  # the other node has read the launch file
            assert time.monotonic() - begun < 120
            time.sleep(0.1)
        assert late.poll() is None, "it waits for its own launch file"
        assert not psutil.Process(late.pid).children()
    late.terminate()
    assert late.wait(10) == 1, "its attempt is not over"
