"""What people read of Slurm's jobs: why they wait, the screen of Snakemake, and `vlmflow status`."""

import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from vlmflow.core.progress import LOG_INTERVAL
from vlmflow.remote.job import LINES, last_lines, newest_progress
from vlmflow.remote.slurm.queue import QueuedJob, ask
from vlmflow.remote.slurm.waiting import UNTIL_SAID, News, reason_in_words, starts_by_itself, will_not_start
from vlmflow.remote.status import has_slurm, of_slurm
from workflow_runs import vlmflow

REASONS = Path(__file__).with_name("reasons.txt").read_text().split()
"""All words of Slurm's documentation of 24.11, and of the library of 22.05."""

DOWN = "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions"


def test_every_word_of_the_documentation_is_explained() -> None:
    assert len(REASONS) > 190
    assert [reason for reason in REASONS if reason_in_words(reason) == reason] == []


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("Resources", "all that it could use is taken"),
        ("QOSMaxJobsPerUserLimit", "its QOS allows each user no more running jobs at a time"),
        ("QOSMaxSubmitJobPerUserLimit", "its QOS allows each user no more running and waiting jobs at a time"),
        ("QOSMaxGRESPerUser", "its QOS allows each user no more GPUs (GRES) at a time"),
        ("MaxGRESPerAccount", "its QOS allows each account no more GPUs (GRES) at a time"),
        ("AssocMaxJobsLimit", "its account allows each user no more running jobs at a time"),
        ("AssocGrpGRES", "the jobs of its account together use all GPUs (GRES) that it allows"),
        ("AssocGrpGRESRunMinutes", "the jobs of its account together use all minutes of GPUs (GRES) that it allows"),
        ("AssocGrpCPUMinutesLimit", "its account has used up its minutes of cores"),
        ("QOSMaxGRESPerNode", "it asks for more GPUs (GRES) than its QOS allows a node of a job"),
        ("QOSMaxWallDurationPerJobLimit", "it asks for more time than its QOS allows a job"),
        ("AssocMaxCpuMinutesPerJobLimit", "it asks for more minutes of cores than its account allows a job"),
        ("QOSMinCpuNotSatisfied", "its QOS asks for more cores than the job does"),
        ("QOSMinMemory", "its QOS asks for more memory than the job does"),
        ("AssociationResourceLimit", "its account allows no more resources"),
        ("ReqNodeNotAvail, UnavailableNodes:node-b", "the nodes that it may use are reserved or down"),
        (DOWN, "the nodes that it needs are down, drained"),
        ("launch failed requeued held", "a node failed to start it"),
    ],
)
def test_a_reason_is_explained(reason: str, words: str) -> None:
    assert reason_in_words(reason).startswith(words)


def test_details_are_kept_and_an_unknown_word_is_shown_as_it_is() -> None:
    assert reason_in_words("ReqNodeNotAvail, UnavailableNodes:node-b").endswith(" (UnavailableNodes:node-b)")
    assert reason_in_words("ReqNodeNotAvail, May be reserved for other job").endswith(
        " (May be reserved for other job)"
    )
    assert "DRAINED" not in reason_in_words(DOWN)
    for reason in ("NewIn30", "some text of an administrator, as it is", "QOSMaxTeaPerUser", ""):
        assert reason_in_words(reason) == reason


def test_which_jobs_never_start_and_which_need_a_person() -> None:
    never = {reason for reason in REASONS if will_not_start(reason)}
    assert never >= {"PartitionTimeLimit", "PartitionNodeLimit", "BadConstraints", "InvalidAccount", "InvalidQOS"}
    assert never >= {"QOSMaxGRESPerJob", "AssocMaxWallDurationPerJobLimit", "QOSMinGRES", "DependencyNeverSatisfied"}
    waits = {"Resources", "Priority", "BeginTime", "QOSMaxGRESPerUser", "AssocGrpGRES", "QOSGrpCPUMinutesLimit", DOWN}
    held = {"JobHeldUser", "JobHeldAdmin", "launch failed requeued held"}
    assert not [reason for reason in waits | held | {"ReqNodeNotAvail, x", "NewIn30"} if will_not_start(reason)]
    assert all(map(starts_by_itself, waits))
    assert not any(map(starts_by_itself, held | never))


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


COMMENT = "vlmflow aaaa bbbb cccc"
QUEUE = f"""\
11|FAILED|BadConstraints||0:00|2025-11-27T19:07:29|{COMMENT}|mix_rows:run=mem
3|PENDING|Resources||0:00|SUBMITTED|{COMMENT}|train_model:run=other
10|PENDING|PartitionTimeLimit||0:00|2025-11-27T19:07:29|{COMMENT}|train_model:run=long
19|PENDING|JobHeldAdmin||0:00|2025-11-27T19:07:30|{COMMENT}|train_model:run=held
2|PENDING|BeginTime||0:00|2025-11-27T19:07:37|{COMMENT}|train_smoke:run=mine
1|RUNNING|None|node-a|1-00:00:32|2025-11-27T19:07:29|{COMMENT}|train_model:run=mine
7|COMPLETING|None|node-[a-b]|0:32|2025-11-27T19:07:29|{COMMENT}|pages
5|RUNNING|None|node-a|0:32|2025-11-27T19:07:29||train_model:run=somebody-else
"""
PLACES = """\
11|2025-11-27T19:07:29|FOLDER
3|2025-11-27T21:07:31|FOLDER
10|N/A|FOLDER
19|2025-11-27T20:07:29|FOLDER
2|2025-11-27T19:09:37|FOLDER
1|2025-11-27T19:07:31|/scratch/ann/other | folder
7|2025-11-27T19:07:31|FOLDER
"""
SHOWN = """\
JobId=1 JobName=train_model:run=mine
   UserId=root(0) GroupId=root(0) MCS_label=N/A
   JobState=RUNNING Reason=None Dependency=(null)
   WorkDir=FOLDER
   Comment=vlmflow aaaa bbbb cccc
   StdErr=FOLDER/logs dir/1.log
   StdIn=/dev/null
   StdOut=FOLDER/logs dir/1.log
   Power=
"""
LOG = """\
smoke: starting
mine · step 3/10 · loss 3.500 · 2.00 s/step · 0:14 left
mine · step 4/10 · loss 3.000 · 2.00 s/step · 0:12 left
a warning of a library
"""
NO_JOB = "slurm_load_jobs error: Invalid job id specified"
OUTAGE = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"

Slurm = Callable[..., Path]


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    """Returns a function that puts commands with given answers on PATH, and returns the folder of the jobs."""
    folder = tmp_path.resolve() / "work"
    (folder / "logs dir").mkdir(parents=True)
    (folder / "logs dir" / "1.log").write_text(LOG)
    commands = tmp_path / "bin"
    commands.mkdir()
    monkeypatch.setenv("PATH", str(commands), prepend=os.pathsep)

    def answers(queue: str = QUEUE, places: str = PLACES, shown: str = SHOWN, fails: str = "") -> Path:
        for name, text in {"queue": queue, "places": places, "shown": shown}.items():
            (commands / f"{name}.txt").write_text(text.replace("FOLDER", str(folder)))
        failure = f'echo "{fails}" >&2; exit 1;' if fails else ""
        squeue = f'{failure} case "$*" in *%Z*) cat {commands}/places.txt;; *) cat {commands}/queue.txt;; esac'
        scontrol = f'[ "$3" = 1 ] || {{ echo "{NO_JOB}" >&2; exit 1; }}; cat {commands}/shown.txt'
        for name, code in (("squeue", squeue), ("scontrol", scontrol)):
            (commands / name).write_text(f"#!/bin/sh\n{code}\n")
            (commands / name).chmod(0o755)
        return folder

    return answers


def test_each_job_of_ours_is_shown_with_its_progress_or_why_it_waits(slurm: Slurm) -> None:
    submitted = (datetime.now() - timedelta(hours=1)).isoformat(timespec="seconds")
    shown = [line.split("  ") for line in of_slurm(slurm(queue=QUEUE.replace("SUBMITTED", submitted))).lines]
    rows = {cells[0]: [cell.strip() for cell in cells[1:] if cell.strip()] for cells in shown}
    numbers = [cells[3] for cells in rows.values()]
    assert numbers == ["10", "1", "7", "19", "2", "3"], "the oldest first; none that has ended, or is somebody else's"
    assert rows["train_model run=mine"] == [
        *("running", "24:00:32", "node-a", "1"),
        "in /scratch/ann/other | folder: mine · step 4/10 · loss 3.000 · 2.00 s/step · 0:12 left",
    ]
    assert rows["pages"] == ["ending", "0:32", "node-[a-b]", "7"], "Slurm has forgotten it meanwhile"
    state, age, where, number, why = rows["train_model run=other"]
    assert (state, where, number) == ("waiting", "-", "3")
    assert age.startswith("1:00:0")
    assert why.startswith("all that it could use is taken")
    assert why.endswith("; Slurm expects to start it at 2025-11-27 21:07")
    assert rows["train_smoke run=mine"][-1].endswith("; Slurm expects to start it at 2025-11-27 19:09")
    assert rows["train_model run=long"][-1].startswith("its time limit is above that of its partition")
    assert rows["train_model run=held"][-1] == "an administrator holds it: ask the site"


def test_no_job_and_no_answer_are_a_line(slurm: Slurm) -> None:
    assert of_slurm(slurm(queue="")).lines == ["Slurm has no job of vlmflow"]
    assert of_slurm(slurm(fails=OUTAGE)).lines == [f"Slurm does not answer: squeue: {OUTAGE}"]
    assert of_slurm(slurm(fails="\x1b]0;title\x07 error")).lines == ["Slurm does not answer: squeue: �]0;title� error"]


def test_what_a_person_lets_squeue_show_hides_no_job(
    slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SQUEUE_PARTITION", "cpu")
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    slurm()
    (tmp_path / "bin" / "squeue").write_text("#!/bin/sh\nenv\n")
    said = ask("squeue").splitlines()
    assert "SLURM_TIME_FORMAT=standard" in said
    assert not [line for line in said if line.startswith("SQUEUE_")]


def test_a_controller_that_is_lost_meanwhile_is_one_line(slurm: Slurm, tmp_path: Path) -> None:
    folder = slurm()
    (tmp_path / "bin" / "scontrol").write_text(f'#!/bin/sh\necho "{OUTAGE}" >&2\nexit 1\n')
    assert of_slurm(folder).lines == [f"Slurm does not answer: scontrol: {OUTAGE}"]


@pytest.mark.lengthy
def test_odd_texts_reach_no_terminal_and_need_no_cluster_of_kubernetes(slurm: Slurm, tmp_path: Path) -> None:
    odd = "train_model:run=\x1b[2Jmine\u202e"
    queue = f"1|RUNNING|None|node-a|x|2025-11-27|{COMMENT}|{odd}\nnonsense\n|||||||||||\n"
    queue += f"2|NEW_STATE|A reason | with \x1b[1m||z|never|{COMMENT}|x\n"
    queue += f"3|PENDING|A reason with \x1b[1m||z|never|{COMMENT}|x"
    folder = slurm(queue=queue, places="1|\x1b|FOLDER/\x1b[3J\nnonsense\n")
    (folder / "logs dir" / "1.log").write_bytes(b"\xff\x1b[2J\rmine \x1b[5m step 4/10 \xc2\xb7 0:12 left\n")
    words = vlmflow("status", "--directory", folder)
    environment = {**os.environ, "KUBECONFIG": str(tmp_path / "none")}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert all(character.isprintable() or character == "\n" for character in done.stdout)
    trains, running, waiting = done.stdout.splitlines()
    assert trains.startswith("this machine trains nothing in ")
    assert running.startswith("train_model run=�[2Jmine�  running  0:00")
    assert running.endswith("mine [5m step 4/10 · 0:12 left")
    assert waiting.split()[:3] == ["x", "waiting", "-"]
    assert waiting.endswith("A reason with �[1m")


def test_without_slurm_it_is_not_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not has_slurm()


def test_the_end_of_a_log_is_read_whatever_it_is(tmp_path: Path) -> None:
    log = tmp_path / "1.log"
    assert last_lines(log) == ""
    log.write_text("".join(f"line {number}\n" for number in range(1000)))
    assert last_lines(log).splitlines()[-1] == "line 999"
    assert len(last_lines(log).split("\n")) == LINES
    log.write_bytes(b"x" * 3_000_000 + b"\nmine \xc2\xb7 0:12 left")
    assert newest_progress(last_lines(log)) == "mine · 0:12 left"
    assert last_lines(tmp_path) == ""
    os.mkfifo(tmp_path / "pipe")
    begun = time.monotonic()
    assert last_lines(tmp_path / "pipe") == ""
    assert time.monotonic() - begun < 1
