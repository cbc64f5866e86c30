"""`make status` on a machine with Slurm: texts that a cluster of Slurm 22.05 has printed, and odd ones."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from vlmflow.remote.job import LINES, last_lines, newest_progress
from vlmflow.remote.slurm.queue import ask
from vlmflow.remote.status import has_slurm, of_slurm
from workflow_runs import ROOT

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
    shown = [line.split("  ") for line in of_slurm(slurm(queue=QUEUE.replace("SUBMITTED", submitted)))]
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
    assert of_slurm(slurm(queue="")) == ["Slurm has no job of vlmflow"]
    assert of_slurm(slurm(fails=OUTAGE)) == [f"Slurm does not answer: squeue: {OUTAGE}"]
    assert of_slurm(slurm(fails="\x1b]0;title\x07 error")) == ["Slurm does not answer: squeue: �]0;title� error"]


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
    assert of_slurm(folder) == [f"Slurm does not answer: scontrol: {OUTAGE}"]


@pytest.mark.lengthy
def test_odd_texts_reach_no_terminal_and_need_no_cluster_of_kubernetes(slurm: Slurm, tmp_path: Path) -> None:
    odd = "train_model:run=\x1b[2Jmine\u202e"
    queue = f"1|RUNNING|None|node-a|x|2025-11-27|{COMMENT}|{odd}\nnonsense\n|||||||||||\n"
    queue += f"2|NEW_STATE|A reason | with \x1b[1m||z|never|{COMMENT}|x\n"
    queue += f"3|PENDING|A reason with \x1b[1m||z|never|{COMMENT}|x"
    folder = slurm(queue=queue, places="1|\x1b|FOLDER/\x1b[3J\nnonsense\n")
    (folder / "logs dir" / "1.log").write_bytes(b"\xff\x1b[2J\rmine \x1b[5m step 4/10 \xc2\xb7 0:12 left\n")
    words = [sys.executable, ROOT / "scripts" / "vlmflow" / "tools" / "status.py", "any", "--directory", folder]
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
