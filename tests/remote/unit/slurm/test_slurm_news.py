"""What Snakemake's screen says of jobs while they wait and run."""

from dataclasses import replace
from pathlib import Path

import pytest

from vlmflow.core.progress import LOG_INTERVAL
from vlmflow.remote.slurm.queue import QueuedJob
from vlmflow.remote.slurm.waiting import UNTIL_SAID, News

WAITING = QueuedJob("7", "PENDING", "Resources", "", 0, "2026-11-27T19:00:00", (), "train_model:r")
RUNNING = replace(WAITING, state="RUNNING", reason="None", where="node-a")
WORDS = "train_model run=r"


class Screen:
    """What was said, and a clock."""

    def __init__(self, log: Path) -> None:
        self.now, self.log = 1000.0, log
        self.lines: list[str] = []
        self._news = News(self.lines.append, lambda: self.now)

    def shows(self, job: QueuedJob, later: float = 0.0) -> list[str]:
        """Return what a look at a job says, some seconds later."""
        self.now, before = self.now + later, len(self.lines)
        self._news.tell(WORDS, job, self.log)
        return self.lines[before:]


@pytest.fixture
def screen(tmp_path: Path) -> Screen:
    return Screen(tmp_path / "7.log")


def test_why_a_job_waits_is_said_once_and_not_at_once(screen: Screen) -> None:
    assert screen.shows(WAITING) == []
    assert screen.shows(WAITING, UNTIL_SAID - 1) == []
    (said,) = screen.shows(WAITING, 1)
    assert said.startswith(f"{WORDS}: job 7 waits: all that it could use is taken")
    assert screen.shows(WAITING, 100) == []
    (said,) = screen.shows(replace(WAITING, reason="JobHeldUser"), 1)
    assert said.startswith(f"{WORDS}: job 7 waits: it is held")
    (said,) = screen.shows(replace(WAITING, reason="odd \x1b[2J"), 1)
    assert "\x1b" not in said


def test_a_job_that_comes_again_is_told_and_then_waits_anew(screen: Screen) -> None:
    assert screen.shows(RUNNING) == []
    again = f"{WORDS}: job 7 is in the queue again, and resumes; this uses no retry"
    assert screen.shows(WAITING, 100) == [again]
    assert screen.shows(WAITING, UNTIL_SAID - 1) == []
    assert len(screen.shows(WAITING, 1)) == 1
    assert screen.shows(RUNNING, 1) == []
    assert screen.shows(WAITING, 1) == [again]
    assert screen.shows(replace(WAITING, id="8"), 1) == [], "another job has not run yet"


def test_progress_is_shown_now_and_then(screen: Screen) -> None:
    def reaches(step: int) -> str:
        line = f"r · step {step}/10 · loss 3.000 · 2.00 s/step · 0:14 left"
        with screen.log.open("a") as log:
            log.write(f"{line}\na warning\n")
        return line

    assert screen.shows(RUNNING) == [], "its log is not there yet"
    first = reaches(1)
    assert screen.shows(RUNNING, LOG_INTERVAL) == [first]
    second = reaches(2)
    assert screen.shows(RUNNING, LOG_INTERVAL - 1) == []
    assert screen.shows(RUNNING, 1) == [second]
    assert screen.shows(RUNNING, LOG_INTERVAL) == [], "nothing new"
    with screen.log.open("a") as log:
        log.write("r\u202e\ue000 · \x1b[2J step 3/10 · 0:10 left\n")
    (said,) = screen.shows(RUNNING, LOG_INTERVAL)
    assert "step 3/10" in said
    assert said.isprintable()
