"""Steps that go wrong in a trainer: which gradients end a training, and what a heartbeat tells."""

import math
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vlmflow.in_trainer.events import FEWEST, IN_A_ROW, Faults, fault_of
from vlmflow.in_trainer.messages import Fault, beats_of, innermost_frames, stacks_of
from workflow_runs import ROOT

USUAL_LOSS = [1.0 + step % 7 / 10 for step in range(60)]


def fault(losses: list[float], gradient: bool = True, warmup: int = 5) -> tuple[Fault, int] | None:
    return fault_of(list(enumerate(losses, start=1)), gradient, warmup)


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_is_found_at_once_also_in_the_warm_up(loss: float) -> None:
    assert fault([12.0, loss], warmup=100) == (Fault.LOSS, 2)


def test_a_gradient_without_a_norm_is_found_at_once() -> None:
    assert fault([12.0], gradient=False) == (Fault.GRADIENT, 1)


@pytest.mark.parametrize("lost", [7.5, 11.9, 200.0])
def test_a_model_that_is_destroyed_is_found_after_some_steps(lost: float) -> None:
    """Such losses stay: those of single tokens without their context, or of guessing."""
    for count in range(1, IN_A_ROW):
        assert fault(USUAL_LOSS + [lost] * count) is None
    assert fault(USUAL_LOSS + [lost] * IN_A_ROW) == (Fault.EXPLODED, 61)


@pytest.mark.parametrize(
    "losses",
    [
        [*USUAL_LOSS, 1.2, 15.0, 1.1, 14.0, 13.0, 12.0, 1.0, 15.0],
        [13.0] * 20 + [12.0, 14.0, 13.5, 13.9, 14.0, 13.7],
        [0.01] * 40 + [2.0] * 5,
        [3.0] * 40 + [8.0] * 5,
        [13.0 - step / 5 for step in range(60)],
        [1.0] * (FEWEST - 1) + [20.0] * IN_A_ROW,
    ],
    ids=["single answers", "an untrained model", "harder rows", "usually high", "falling", "nothing is usual yet"],
)
def test_losses_of_good_trainings_are_no_fault(losses: list[float]) -> None:
    assert all(fault(losses[:count]) is None for count in range(1, len(losses) + 1))


def test_losses_of_the_warm_up_may_be_anything_finite() -> None:
    losses = [1.0] * 20 + [20.0] * IN_A_ROW
    assert fault(losses, warmup=21) is None
    assert fault(losses, warmup=20) == (Fault.EXPLODED, 21)


@pytest.mark.parametrize(
    ("norm", "fp16", "finite"),
    [
        (1.0, False, True),
        (float("inf"), False, False),
        (float("nan"), False, False),
        (float("inf"), True, True),  # the scaler tries a lower scale
        (None, False, True),
    ],
)
def test_a_skipped_update_is_excused_with_float16_alone(
    tmp_path: Path, norm: float | None, fp16: bool, finite: bool
) -> None:
    trainer: Any = SimpleNamespace(
        args=SimpleNamespace(fp16=fp16),
        _get_grad_norm=lambda: norm,
    )
    orders: Any = SimpleNamespace(folder=tmp_path)
    ranks: Any = SimpleNamespace(tell={})
    batches: Any = SimpleNamespace(losses=[torch.tensor(2.0), torch.tensor(0.5)])
    Faults(orders, trainer, ranks, batches)
    trainer._get_grad_norm()
    assert ranks.tell["loss"]() == (2.5, finite)


STUCK = """
import ctypes, sys, threading, time
from pathlib import Path
from vlmflow.in_trainer.messages import Doing, Heart
heart = Heart(Path(sys.argv[1]), 3)
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
sleep = ctypes.PyDLL(None).sleep

def innermost():
    print("stuck", flush=True)
    while True:
        sleep(60)  # as code that is compiled and keeps Python's lock

def outer():
    heart.beat(Doing.TRAINING)
    heart.beat(Doing.TRAINING)
    innermost()

outer()
"""


def test_a_process_that_is_stuck_in_compiled_code_says_where_it_is(tmp_path: Path) -> None:
    words = [sys.executable, "-c", STUCK, str(tmp_path)]
    environment = {"PYTHONPATH": str(ROOT / "scripts")}
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout.readline() == "stuck\n"
        assert beats_of(tmp_path, 3).read_text() == "training"
        assert innermost_frames(stacks_of(tmp_path, 3).read_text(), 3) == []
        process.send_signal(signal.SIGUSR1)
        until = time.monotonic() + 20
        while "in outer" not in (stacks := stacks_of(tmp_path, 3).read_text()) and time.monotonic() < until:
            time.sleep(0.05)
        process.kill()
    frames = innermost_frames(stacks, 2)
    assert [frame.partition(" ")[0] for frame in frames] == ["innermost", "outer"]


STACKS = """Thread 0x00007f0001 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Current thread 0x00007f0002 (most recent call first):
  File "/x/torch/distributed/distributed_c10d.py", line 2799 in all_gather
  File "/x/vlmflow/in_trainer/engine.py", line 16 in gather
  File "/x/vlmflow/in_trainer/stop.py", line 150 in on_step_end
  File "<frozen runpy>", line 88 in _run_code

Extension modules: numpy._core._multiarray_umath (total: 1)
"""


def test_the_innermost_frames_are_those_of_the_thread_that_was_asked() -> None:
    found = ["all_gather (distributed/distributed_c10d.py:2799)", "gather (in_trainer/engine.py:16)"]
    assert innermost_frames(STACKS, 2) == found
    assert innermost_frames(STACKS + STACKS, 9)[2:] == [
        "on_step_end (in_trainer/stop.py:150)",
        "_run_code (<frozen runpy>:88)",
    ]
    assert innermost_frames("", 3) == []
