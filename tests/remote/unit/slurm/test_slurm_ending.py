"""Jobs are ended for good: those that wait at once, trainers after they have saved."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from slurm_commands import SlurmCommands
from vlmflow.remote.slurm import queue as slurm_queue
from vlmflow.remote.slurm.queue import end_jobs

OUTAGE = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
GONE = "scancel: error: Kill job error on job id 2: Invalid job id specified"


def queue(**states: str) -> str:
    """Return what squeue prints of jobs: their states, by letters for their numbers."""
    lines = (
        f"{number[1:]}|{state}|None|n|0:30|2026-11-27T19:00:00|vlmflow a b c|x" for number, state in states.items()
    )
    return "\n".join(lines)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SlurmCommands:
    """Slurm's commands, and a clock on which each pause takes its time at once."""
    now = [0.0]

    def pause(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(slurm_queue, "time", SimpleNamespace(sleep=pause, monotonic=lambda: now[0]))
    commands = SlurmCommands(tmp_path, monkeypatch)
    for name in ("scontrol", "scancel"):
        commands.answer(name)
    return commands


def answers(slurm: SlurmCommands, folder: Path, *queues: str) -> None:
    """Let squeue give one answer after the other, the last one for ever."""
    for number, text in enumerate(queues):
        (folder / f"queue-{number}").write_text(text)
    last = len(queues) - 1
    count = f"number=$(grep -c squeue {folder}/calls); number=$((number > {last} ? {last} : number - 1))"
    slurm.do("squeue", f"{count}; cat {folder}/queue-$number")


def test_a_trainer_saves_first_and_no_job_comes_again(slurm: SlurmCommands, tmp_path: Path) -> None:
    running = queue(j1="RUNNING", j2="RUNNING", j3="CANCELLED")
    answers(slurm, tmp_path, running, running, queue(j1="COMPLETING", j2="CANCELLED"), queue(j1="CANCELLED"))
    said: list[str] = []
    end_jobs({"1": 180, "2": 0, "3": 180}, said.append)
    assert said == ["1 job of trainers: to save a checkpoint and end. Ctrl-C ends them at once."]
    assert slurm.calls("scontrol", "scancel") == [
        *(f"scontrol update JobId={number} Requeue=0" for number in (1, 2, 3)),
        "scancel --state=PENDING 1 2 3",
        "scancel --signal=TERM 1",
        "scancel 2 3",
    ]


def test_a_trainer_that_does_not_end_in_time_is_ended(slurm: SlurmCommands, tmp_path: Path) -> None:
    answers(slurm, tmp_path, queue(j1="RUNNING", j2="RUNNING"))
    end_jobs({"1": 3, "2": 2}, lambda text: None)
    assert slurm.calls("scancel")[-2:] == ["scancel --signal=TERM 1 2", "scancel 1 2"]
    assert len(slurm.calls("squeue")) == 1 + 3


def test_jobs_that_have_ended_meanwhile_are_no_fault(slurm: SlurmCommands) -> None:
    for name in ("scontrol", "scancel"):
        slurm.answer(name, fails=GONE)
    slurm.answer("squeue")
    said: list[str] = []
    end_jobs({"1": 180, "2": 0}, said.append)
    assert said == []
    end_jobs({}, said.append)
    assert said == []


def test_ctrl_c_ends_all_at_once(slurm: SlurmCommands) -> None:
    slurm.answer("squeue", queue(j1="RUNNING", j2="PENDING"))
    keys: Iterator[BaseException] = iter([KeyboardInterrupt()])

    def say(text: str) -> None:
        raise next(keys)

    end_jobs({"1": 180, "2": 0}, say)
    assert slurm.calls("scancel") == ["scancel --state=PENDING 1 2", "scancel 1 2"]


def test_an_outage_names_the_jobs_that_may_still_run(slurm: SlurmCommands) -> None:
    slurm.answer("scontrol", fails=OUTAGE)
    said: list[str] = []
    end_jobs({"1": 180, "2": 0}, said.append)
    assert said == [f"scontrol: {OUTAGE}; these jobs may still run: 1 2. scancel ends them."]
    assert slurm.calls("scancel") == []
