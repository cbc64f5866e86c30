"""Signals that end a training while its trainers start."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil
import pytest

from vlmflow.trainer import process as trainer
from vlmflow.trainer.orders import Orders
from vlmflow.training.agent import let_them_save
from vlmflow.training.launch import signals_passed_on
from workflow_runs import ROOT

STARTER = """
import os, subprocess, sys
subprocess.run(["sleep", "60"], env=os.environ | {"RANK": sys.argv[1]} if sys.argv[1] else None)
"""


@contextmanager
def starter(rank: str) -> Iterator[subprocess.Popen[bytes]]:
    """Yield a process in torchrun's place whose only child has that rank; "" if it is no trainer."""
    env = {key: value for key, value in os.environ.items() if key != "RANK"}
    with subprocess.Popen([sys.executable, "-c", STARTER, rank], env=env) as torchrun:
        try:
            while not any(child.name() == "sleep" for child in psutil.Process(torchrun.pid).children()):
                time.sleep(0.01)
            children = psutil.Process(torchrun.pid).children()
            yield torchrun
        finally:
            torchrun.kill()
            for child in children:
                with suppress(psutil.NoSuchProcess):
                    child.kill()


@pytest.mark.parametrize(("rank", "asked", "code"), [("0", 1, 0), ("", 0, -signal.SIGKILL)])
def test_a_program_that_torchrun_asks_is_no_trainer(rank: str, asked: int, code: int) -> None:
    """As when it runs ldconfig, before it starts the trainers: it would start them after the signal."""
    with starter(rank) as torchrun:
        assert let_them_save(torchrun) == asked
        assert torchrun.wait(30) == code


def test_a_signal_before_the_trainers_are_there_reaches_them() -> None:
    with signals_passed_on() as signals:
        signal.raise_signal(signal.SIGTERM)
        with starter("") as torchrun:
            signals.reach(torchrun)
            assert torchrun.wait(30) == -signal.SIGKILL
    assert signals.numbers == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_trainer_whose_torchrun_was_killed_ends_at_once() -> None:
    """Another process adopts it, so the end of its parent tells it nothing."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    orders = Orders(folder="/", starter=gone.pid, processes=1, tuner="lora", strategy="ddp", early_stop_after=None)
    done = subprocess.run(
        [sys.executable, "-m", trainer.__name__, orders.as_word()],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(ROOT / "scripts")},
    )
    assert done.returncode == 1
    assert "has no torchrun any more" in done.stderr
