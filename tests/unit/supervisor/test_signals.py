"""Signals that end a training while its trainers start."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

from cluster.shell import wait_for
from vlmflow.in_trainer import process as trainer
from vlmflow.in_trainer.messages import Orders
from vlmflow.supervisor.launch import let_them_save
from vlmflow.supervisor.watch import signals_passed_on
from workflow_runs import ROOT

STARTER = """
import os, subprocess, sys
other = subprocess.Popen(["sleep", "60"])  # as ldconfig, which tells torchrun about the machine
sys.stdin.read()
subprocess.run(["sleep", "60"], env=os.environ | {"RANK": "0"})
other.kill()
"""


@contextmanager
def program(text: str) -> Iterator[subprocess.Popen[bytes]]:
    """Yield a process in torchrun's place that runs a program, and kill it and its children afterwards."""
    env = {key: value for key, value in os.environ.items() if key != "RANK"}
    with subprocess.Popen([sys.executable, "-c", text], env=env, stdin=subprocess.PIPE) as torchrun:
        try:
            yield torchrun
        finally:
            with suppress(psutil.NoSuchProcess):
                for child in psutil.Process(torchrun.pid).children():
                    child.kill()
            torchrun.kill()


def children(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children()


def go_on(process: subprocess.Popen[bytes]) -> None:
    """End a program's input, which it reads to know when."""
    assert process.stdin is not None
    process.stdin.close()


def test_a_signal_reaches_a_trainer_that_starts_after_it() -> None:
    """The first child of torchrun is no trainer, and gets no signal in its place."""
    asked: set[int] = set()
    with program(STARTER) as torchrun:
        wait_for("a first child", lambda: children(torchrun))
        (first,) = children(torchrun)
        let_them_save(torchrun, asked)
        assert asked == set()
        assert first.is_running()
        go_on(torchrun)
        while torchrun.poll() is None:
            let_them_save(torchrun, asked)
            time.sleep(0.02)
        assert torchrun.returncode == 0, "it ended by itself: its trainer did"
    assert len(asked) == 1
    assert first.pid not in asked


def test_trainers_that_have_just_ended_are_no_reason_to_kill_torchrun() -> None:
    """Their exit codes say that the training is finished."""
    with program("import os, sys\nif os.fork():\n    sys.stdin.read()") as torchrun:
        zombie = psutil.STATUS_ZOMBIE
        wait_for("a child has ended", lambda: [child for child in children(torchrun) if child.status() == zombie])
        let_them_save(torchrun, set())
        go_on(torchrun)
        assert torchrun.wait(30) == 0


def test_a_signal_before_the_trainers_are_there_ends_their_start() -> None:
    with signals_passed_on() as signals, program("import time; time.sleep(60)") as torchrun:
        signal.raise_signal(signal.SIGTERM)
        signals.trainers = torchrun
        signals.pass_on()
        assert torchrun.wait(30) == -signal.SIGKILL
    assert signals.numbers == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_trainer_whose_torchrun_was_killed_ends_at_once() -> None:
    """Another process adopts it, so the end of its parent tells it nothing."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    orders = Orders(
        folder="/",
        starter=gone.pid,
        processes=1,
        batches_per_step=1,
        tuner="lora",
        strategy="ddp",
        early_stop_after=None,
    )
    done = subprocess.run(
        [sys.executable, "-m", trainer.__name__, orders.as_word()],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(ROOT / "scripts")},
    )
    assert done.returncode == 1
    assert "has no torchrun any more" in done.stderr
