"""The starts of a trial's step: a signal ends one, and hours are those that were trained."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from made_search import result
from vlmflow.core.account import write_account
from vlmflow.search.study import AskedTrial
from vlmflow.search.trial import KeptResult, Starts, Step, one_start, starts_of, wait_for_others
from vlmflow.supervisor.run_folder import RunFolder
from workflow_runs import ROOT

START = """
import os, signal, subprocess, sys, time
from pathlib import Path
from vlmflow.search.trial import Step, one_start
from vlmflow.supervisor.run_folder import RunFolder

def send():
    signal.raise_signal(signal.SIGTERM)

if sys.argv[2] == "fork":
    os.register_at_fork(after_in_parent=send)
with one_start(Step(RunFolder(Path(sys.argv[1])), "s", 4)):
    time.sleep(0.1)
    if sys.argv[2] == "fork":
        subprocess.run(["true"], preexec_fn=lambda: None)
    else:
        send()
    print("it goes on")
"""


@pytest.mark.parametrize("when", ["in the block", "fork"])
def test_sigterm_ends_a_start_and_is_recorded(tmp_path: Path, when: str) -> None:
    """Also while it starts a process: Python drops what a handler of signals raises there."""
    done = subprocess.run(
        [sys.executable, "-c", START, str(tmp_path), when],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(ROOT / "scripts")},
    )
    assert (done.returncode, done.stdout) == (143, ""), done.stderr
    ended = starts_of(Step(RunFolder(tmp_path), "s", 4))
    assert (ended.tries, ended.since) == (0, None)
    assert ended.seconds >= 0.1


def test_a_killed_start_that_still_trains_is_waited_for_and_its_hours_count(tmp_path: Path) -> None:
    """Its trainers hold the folder, and save, when the same command is called again at once."""
    step = Step(RunFolder(tmp_path), "s", 4)
    step.file.parent.mkdir()
    free = threading.Event()

    def train() -> None:
        with step.folder.held({}):
            free.wait(30)
            step.folder.trainer_log.write_text("saved\n")

    other = threading.Thread(target=train)
    other.start()
    while not step.folder.holder():
        time.sleep(0.01)
    write_account(step.file, Starts(1, 0, 10.0, time.time() - 3600))
    threading.Timer(1, free.set).start()
    wait_for_others(step.folder)
    assert free.is_set()
    assert starts_of(step).seconds == pytest.approx(3611, abs=30)
    other.join()


def test_each_search_has_its_own_starts(tmp_path: Path) -> None:
    """With the same settings two searches train in one folder."""
    mine, others = (Step(RunFolder(tmp_path), name, 4) for name in ("mine", "others"))
    mine.file.parent.mkdir()
    write_account(mine.file, Starts(1, 0, 10.0, None))
    assert starts_of(others) == Starts(0, 0, 0.0, None)


def test_a_killed_start_of_another_search_gets_no_hours_of_this_one(tmp_path: Path) -> None:
    mine, others = (Step(RunFolder(tmp_path), name, 4) for name in ("mine", "others"))
    others.file.parent.mkdir()
    write_account(others.file, Starts(1, 0, 0.0, time.time() - 36000))
    log = mine.folder.trainer_log
    log.write_text("loading\n")
    os.utime(log, (time.time() - 35000, time.time() - 35000))
    with one_start(mine):
        log.write_text("step 1\n")
    assert starts_of(others).seconds == pytest.approx(1000, abs=30)


def test_what_another_search_trained_costs_no_hours() -> None:
    asked = AskedTrial(number=7, settings={"learning_rate": 0.1}, steps=10, hours=None)
    kept = KeptResult("others", result(AskedTrial(number=2, settings={}, steps=10, hours=None), 0.5, hours=3.0))
    found = kept.of("mine", asked)
    assert (found.number, found.settings, found.value) == (7, {"learning_rate": 0.1}, 0.5)
    assert (found.hours, found.gpu_hours) == (0, 0)
    assert (kept.of("others", asked).hours, kept.of("others", asked).gpu_hours) == (3.0, 1.0)
