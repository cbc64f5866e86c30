"""How a training ends: the cause of a failure in the trainers' log, and signals while its trainers start."""

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from cluster.shell import wait_for
from vlmflow.core import lease, patience
from vlmflow.core.errors import PassingError
from vlmflow.core.lease import Lease
from vlmflow.in_trainer import process as trainer
from vlmflow.in_trainer.messages import Doing, Orders
from vlmflow.search.trial import Step, starts_of
from vlmflow.serving import server
from vlmflow.supervisor import group as group_module
from vlmflow.supervisor import launch, run_folder, watch
from vlmflow.supervisor.failures import LogTail, OutOfGpuMemoryError, failure_of
from vlmflow.supervisor.group import FOR_END, Group
from vlmflow.supervisor.launch import let_them_save
from vlmflow.supervisor.run_folder import RunFolder
from vlmflow.supervisor.watch import Launcher, signals_passed_on
from workflow_runs import ROOT


def test_a_watch_that_was_stopped_itself_counts_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the trainers: by scontrol suspend, SIGSTOP, or a paused machine."""
    now = 1_000.0
    for module in (watch, patience):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now, time=time.time))
    hangs = watch.HangWatch(tmp_path, 1, minutes=1)
    beats = watch.beats_of(tmp_path, 0)
    beats.parent.mkdir()
    beats.write_text(Doing.TRAINING)
    for _ in range(30):
        now += 1
        assert hangs.silent_for() is None
    now += 3_600
    assert hangs.silent_for() is None
    for _ in range(59):
        now += 1
        assert hangs.silent_for() is None
    now += 2
    assert hangs.silent_for() == pytest.approx(61 / 60)


TRIAL = """
import sys, time
from pathlib import Path
from vlmflow.core import patience
from vlmflow.in_trainer.messages import Heart
from vlmflow.search.trial import Step, one_start
from vlmflow.supervisor.run_folder import RunFolder
patience.STOPPED = 1.5
with one_start(Step(RunFolder(Path(sys.argv[1])), "s", 4)):
    heart = Heart(Path(sys.argv[1]), 0, seconds=3)
    print("begun", flush=True)
    sys.stdin.readline()
    print(heart.is_over, flush=True)
    time.sleep(0.2)
"""


def test_time_in_which_a_trial_was_stopped_does_not_count(tmp_path: Path) -> None:
    """Neither among the hours that it took, nor for its trainer, which ends when they are over."""
    call, env = [sys.executable, "-c", TRIAL, str(tmp_path)], os.environ | {"PYTHONPATH": str(ROOT / "scripts")}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(call, env=env, **pipes) as process:
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGSTOP)
        time.sleep(3.5)
        process.send_signal(signal.SIGCONT)
        assert process.communicate("\n")[0] == "False\n"
    assert 0 < starts_of(Step(RunFolder(tmp_path), "s", 4)).seconds < 3


def nobody_answers(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Wait 60 s for a server."""
    server._wait_until_healthy(process, 1, 60, folder / "server.log", "m")


def a_training_holds_the_folder(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Wait 60 s for its lock."""
    with (folder / "lock").open("w") as held, (folder / "lock").open() as wanted:
        fcntl.flock(held, fcntl.LOCK_EX)
        RunFolder(folder)._wait_for(wanted.fileno(), 60)


def a_silent_holder_has_the_lease(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Wait 60 s for its count, and take over."""
    Lease(folder, "one")._create(1)
    Lease(folder, "two", silence=60)._win(3_600)
    raise PassingError("taken over", "")


def a_node_does_not_stop(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Wait for its answer, as long as for one on this machine."""
    group = object.__new__(Group)
    group._launch, group._here, group.others, group.is_local = None, {}, [1], True
    group._may_run = lambda node: True
    group.stop(signalled=False)
    raise PassingError("given up", "")


@pytest.mark.parametrize(
    "wait", [nobody_answers, a_training_holds_the_folder, a_silent_holder_has_the_lease, a_node_does_not_stop]
)
def test_who_was_stopped_while_waiting_waits_anew(
    wait: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what it waits for; otherwise it gives up at its first look."""
    times, paused = [0.0], 600

    def sleep(seconds: float) -> None:
        times.append(times[-1] + (paused if len(times) == 2 else seconds))

    clock = SimpleNamespace(monotonic=lambda: times[-1], time=time.time, sleep=sleep)
    for module in (patience, server, run_folder, lease, group_module):
        monkeypatch.setattr(module, "time", clock)
    (tmp_path / "server.log").touch()
    with subprocess.Popen(["sleep", "60"]) as process:
        with pytest.raises(PassingError):
            wait(process, tmp_path)
        process.kill()
    waited = FOR_END if wait is a_node_does_not_stop else 60
    assert paused + waited <= times[-1] < paused + waited + 5


def test_a_long_progress_bar_does_not_hide_the_cause_and_costs_no_time(tmp_path: Path) -> None:
    """A bar has no line end; patterns took quadratic time on it, minutes for one evaluation."""
    log = tmp_path / "trainer.log"
    bar = "\r".join(f"Val: {count}/100000 [00:00<00:00, 9.9it/s]" for count in range(100_000))
    log.write_text(f"{bar}\n{'x' * 1_000_000}\nValueError: the cause\n")
    began = time.monotonic()
    failure = failure_of(1, [LogTail(log, 0)], "train r")
    assert failure.cause == "train r: ValueError: the cause"
    assert time.monotonic() - began < 10


def test_a_lost_connection_does_not_hide_why_another_node_failed(tmp_path: Path) -> None:
    here, there = tmp_path / "trainer.log", tmp_path / "trainer-1.log"
    there.write_text("ValueError: an earlier session's\nKeyError: 'the cause'\n")
    here.write_text("RuntimeError: [pair.cc:534] Connection closed by peer [10.1.0.7]:4711\n")
    logs = [
        LogTail(here, 0),
        LogTail(there, len("ValueError: an earlier session's\n")),
        LogTail(tmp_path / "trainer-2.log"),
    ]
    failure = failure_of(1, logs, "train r")
    assert failure.cause == "train r: KeyError: 'the cause'"
    assert str(there) in failure.next_step
    assert "Connection closed" in failure_of(1, [LogTail(here, 0)], "train r").cause


def test_what_trainers_say_that_we_end_is_no_cause(tmp_path: Path) -> None:
    here, there = tmp_path / "trainer.log", tmp_path / "trainer-1.log"
    logs = [LogTail(here), LogTail(there)]
    here.write_text("ValueError: the cause\n")
    there.write_text("still at work\n")
    logs[1].end_here()
    there.write_text("still at work\nSignal 9 (SIGKILL) received by PID 7\n")
    assert failure_of(1, logs, "train r").cause == "train r: ValueError: the cause"


@pytest.mark.parametrize(
    "said",
    [
        "",
        "ChildFailedError: \n  exitcode  : -15 (pid: 7)\n  traceback : Signal 15 (SIGTERM) received by PID 7",
        "  exitcode  : -9 (pid: 7)  (SIGKILL)\n  traceback : Signal 9 (SIGKILL) received by PID 7",
        "torch.distributed.elastic.multiprocessing.api.SignalException: Process 7 got signal: 15",
    ],
)
def test_a_signal_that_we_passed_on_is_the_cause_where_the_log_has_no_other(tmp_path: Path, said: str) -> None:
    """Trainers that still import end without a word; the message spoke of memory."""
    log = tmp_path / "trainer.log"
    log.write_text(f"{said}\n")
    failure = failure_of(1, [LogTail(log, 0)], "train r", [signal.SIGTERM])
    assert isinstance(failure, PassingError)
    assert failure.cause == "train r: SIGTERM ended the trainers before they could save a checkpoint"
    assert failure.next_step.startswith("run the same command again: it resumes")
    assert "SIGTERM" not in failure_of(1, [LogTail(log, 0)], "train r").cause
    log.write_text(f"ValueError: the cause\n{said}\n")
    assert failure_of(1, [LogTail(log, 0)], "train r", [signal.SIGTERM]).cause == "train r: ValueError: the cause"


@pytest.mark.parametrize(
    "said",
    [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        "torch.AcceleratorError: CUDA error: out of memory",
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'",
    ],
)
def test_memory_of_a_gpu_has_many_names(tmp_path: Path, said: str) -> None:
    """None of them is a fault of the machine, which another attempt might not meet."""
    log = tmp_path / "trainer.log"
    log.write_text(f"[rank0]: {said}\n")
    assert isinstance(failure_of(1, [LogTail(log, 0)], "train r"), OutOfGpuMemoryError)


def test_a_launch_says_which_signal_ended_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path / "run")
    monkeypatch.setattr(launch, "command", lambda *_: ["sleep", "60"])
    monkeypatch.setattr(launch, "environment", lambda *_: dict(os.environ))
    training: Any = SimpleNamespace(nodes=1, ranks=1, settings=SimpleNamespace(hang_minutes=10))

    def interrupt(folder: RunFolder, runs: bool) -> None:
        if runs:
            os.kill(os.getpid(), signal.SIGTERM)

    with folder.held({}) as lock, pytest.raises(PassingError, match="train r: SIGTERM ended the trainers"):
        Launcher(folder, lock, Group(training, folder, 1), "train r", interrupt).launch(training, None)


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
