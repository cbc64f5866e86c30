"""Jobs of Slurm from inside and from outside: what each node becomes, whether one comes again, and how it ends."""

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from slurm_commands import SlurmCommands
from vlmflow.remote.job import memory_kills
from vlmflow.remote.slurm import in_job
from vlmflow.remote.slurm import queue as slurm_queue
from vlmflow.remote.slurm.queue import end_jobs, ended_of, read_verdict, without_a_save
from workflow_runs import ROOT


@pytest.mark.parametrize(
    ("number", "restarts", "command"),
    [
        ("0", None, ["python3", "-m", "snakemake", "x y"]),
        (
            "1",
            None,
            [sys.executable, "-m", "vlmflow.supervisor.other_node", "stores/runs/r", "slurm-123456-0", "1", "8"],
        ),
        ("0", "2", ["python3", "-m", "snakemake", "x y"]),
        (
            "3",
            "2",
            [sys.executable, "-m", "vlmflow.supervisor.other_node", "stores/runs/r", "slurm-123456-2", "3", "8"],
        ),
    ],
)
def test_node_0_runs_snakemake_and_each_other_an_agent_of_the_same_attempt(
    monkeypatch: pytest.MonkeyPatch, number: str, restarts: str | None, command: list[str]
) -> None:
    given = {"SLURM_JOB_ID": "123456", "SLURM_PROCID": number, "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.7", "HOME": "/x"}
    became: list[tuple[str, list[str], dict[str, str]]] = []
    monkeypatch.setattr(os, "environ", given | ({"SLURM_RESTART_COUNT": restarts} if restarts else {}))
    monkeypatch.setattr(sys, "argv", [in_job.__file__, "stores/runs/r", "8", "python3", "-m", "snakemake", "x y"])
    monkeypatch.setattr(os, "execvp", lambda program, words: became.append((program, words, dict(os.environ))))
    in_job.become_node()
    ((program, words, environment),) = became
    assert (program, words) == (command[0], command)
    added = {name: value for name, value in environment.items() if name.startswith("VLMFLOW_")}
    assert added == {
        "VLMFLOW_ATTEMPT": f"slurm-123456-{restarts or 0}",
        "VLMFLOW_NODE_0": "10.0.0.7",
        "VLMFLOW_PORT": str(29500 + 3456),
    }
    assert environment["HOME"] == "/x"


WARNING = 180
NEAR, FAR = f"RUNNING|{(WARNING + 59) // 60}:59\n", "RUNNING|1-00:00:00\n"
"""Answers of squeue: less time is left than when a job is told of its limit, or more."""

JOB = """
import os, signal, sys, time
from types import SimpleNamespace
from vlmflow.harness.patches import on_sigterm
from vlmflow.remote.slurm import in_job
in_job.UNTIL_REQUEUED = 0
job = SimpleNamespace(resources={"warning_seconds": 180})
in_job.install(SimpleNamespace(dag=SimpleNamespace(jobs=[job]), scheduler=None), on_sigterm)
if sys.argv[1:] == ["told"]:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(20)
sys.exit(1)
"""
"""The Snakemake of a job, which ends before it has begun: by itself, or because it is told."""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SlurmCommands:
    monkeypatch.setattr(in_job, "UNTIL_REQUEUED", 0)
    commands = SlurmCommands(tmp_path, monkeypatch)
    commands.answer("scontrol")
    return commands


@pytest.mark.parametrize(
    ("answer", "saved", "restarts", "why"),
    [
        (NEAR, True, 0, ""),
        (NEAR, True, 500, ""),
        (NEAR, False, 0, "it saved nothing within its time limit: raise its runtime, or warning_seconds"),
        (FAR, False, 0, ""),
        ("RUNNING|UNLIMITED\n", False, 19, ""),
        (FAR, False, 20, "it lost its place 20 times and saved nothing"),
        ("COMPLETING|1:00\n", True, 0, "it was COMPLETING after the signal"),
        ("CANCELLED|1:00\n", True, 0, "it was CANCELLED after the signal"),
        ("", True, 0, "Slurm does not let it come again: "),
        ("RUNNING|1:00\nRUNNING|1:00\n", True, 0, "Slurm does not let it come again: "),
    ],
    ids=[
        *("saved", "saved every time", "saved nothing at its limit", "lost its place", "no limit"),
        *("lost its place for ever", "cancelled", "gone", "no answer", "two answers"),
    ],
)
def test_a_job_comes_again_if_it_saved_or_lost_its_place(
    slurm: SlurmCommands, monkeypatch: pytest.MonkeyPatch, answer: str, saved: bool, restarts: int, why: str
) -> None:
    monkeypatch.setenv("SLURM_RESTART_COUNT", str(restarts))
    slurm.answer("squeue", answer)
    said = in_job.requeue("7", saved, WARNING)
    assert said == why if not why.endswith(" ") else said.startswith(why)
    assert slurm.calls("scontrol") == ([] if why else ["scontrol requeue 7"])


@pytest.mark.parametrize("command", ["squeue", "scontrol"])
def test_an_outage_is_told(slurm: SlurmCommands, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    slurm.answer("squeue", FAR)
    slurm.answer(command, fails="slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
    said = in_job.requeue("7", True, WARNING)
    assert said.startswith(f"Slurm does not let it come again: {command}: slurm_load_jobs error: Unable to contact")


@pytest.mark.parametrize(
    ("words", "answer", "calls", "why"),
    [
        ([], FAR, [], None),
        (["told"], FAR, ["scontrol requeue 7"], None),
        (["told"], NEAR, [], "it saved nothing within its time limit: raise its runtime, or warning_seconds"),
    ],
    ids=["a failure of its own", "told while it starts", "told while it starts, at its limit"],
)
def test_only_a_job_that_was_told_asks_to_come_again(
    slurm: SlurmCommands, tmp_path: Path, words: list[str], answer: str, calls: list[str], why: str | None
) -> None:
    """It reads no verdict of an earlier start."""
    verdict = tmp_path / "ends" / "7.json"
    verdict.parent.mkdir()
    verdict.write_text('{"saved": true}')
    slurm.answer("squeue", answer)
    own = {"SLURM_JOB_ID": "7", in_job.ENDS: str(verdict.parent), "PYTHONPATH": str(ROOT / "scripts")}
    done = subprocess.run(
        [sys.executable, "-c", JOB, *words], env=os.environ | own, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert [call for call in slurm.calls("scontrol") if "show config" not in call] == calls  # the plugin's import
    assert (json.loads(verdict.read_text()) if verdict.exists() else None) == (why and {"again": False, "why": why})
    assert done.stderr == (f"{why}\n" if why else "")


STAGE = """
import signal, subprocess, sys, threading, time
from pathlib import Path
folder, child = Path(sys.argv[1]), None
def save(*given):
    print("saves", flush=True)
    threading.Timer(1, child.kill).start()
def wait_for(name):
    while not (folder / name).exists():
        time.sleep(0.01)
wait_for("train")
before = signal.signal(signal.SIGTERM, save)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(40)", "torch.distributed.run"])
child.wait()
signal.signal(signal.SIGTERM, before)
print("trained", flush=True)
wait_for("end")
print("ends well", flush=True)
"""
"""A stage that saves when it is told, while it has trainers; at other times it would just end."""


def test_a_stage_is_told_once_its_trainers_run(tmp_path: Path) -> None:
    """Behind its shell; and not before, nor when their result is being put in place."""
    tells = f"import sys; sys.path.insert(0, {str(ROOT / 'scripts')!r}); from vlmflow.remote.slurm import in_job\n"
    tells += "import subprocess, threading\nthreading.Thread(target=in_job.tell_trainers, daemon=True).start()\n"
    tells += "print(subprocess.run(['sh', '-c', sys.argv[1] + '; true']).returncode)"
    (tmp_path / "stage.py").write_text(STAGE)
    words = f"{sys.executable} {tmp_path}/stage.py {tmp_path}"
    with subprocess.Popen([sys.executable, "-c", tells, words], stdout=subprocess.PIPE, text=True) as snakemake:
        assert snakemake.stdout is not None
        time.sleep(1.5)
        assert snakemake.poll() is None
        (tmp_path / "train").touch()
        assert select.select([snakemake.stdout], [], [], 30)[0]
        assert [snakemake.stdout.readline() for _ in range(2)] == ["saves\n", "trained\n"]
        time.sleep(0.5)
        (tmp_path / "end").touch()
        assert snakemake.stdout.read() == "ends well\n0\n"


OUTAGE = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
GONE = "scancel: error: Kill job error on job id 2: Invalid job id specified"


def queue(**states: str) -> str:
    """Return what squeue prints of jobs: their states, by letters for their numbers."""
    lines = (
        f"{number[1:]}|{state}|None|n|0:30|2026-11-27T19:00:00|vlmflow a b c|x" for number, state in states.items()
    )
    return "\n".join(lines)


@pytest.fixture
def ending_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SlurmCommands:
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


def test_a_trainer_saves_first_and_no_job_comes_again(ending_slurm: SlurmCommands, tmp_path: Path) -> None:
    running = queue(j1="RUNNING", j2="RUNNING", j3="CANCELLED")
    answers(ending_slurm, tmp_path, running, running, queue(j1="COMPLETING", j2="CANCELLED"), queue(j1="CANCELLED"))
    said: list[str] = []
    end_jobs({"1": 180, "2": 0, "3": 180}, said.append)
    assert said == ["1 job of trainers: to save a checkpoint and end. Ctrl-C ends them at once."]
    assert ending_slurm.calls("scontrol", "scancel") == [
        *(f"scontrol update JobId={number} Requeue=0" for number in (1, 2, 3)),
        "scancel --state=PENDING 1 2 3",
        "scancel --signal=TERM 1",
        "scancel 2 3",
    ]


def test_a_trainer_that_does_not_end_in_time_is_ended(ending_slurm: SlurmCommands, tmp_path: Path) -> None:
    answers(ending_slurm, tmp_path, queue(j1="RUNNING", j2="RUNNING"))
    end_jobs({"1": 3, "2": 2}, lambda text: None)
    assert ending_slurm.calls("scancel")[-2:] == ["scancel --signal=TERM 1 2", "scancel 1 2"]
    assert len(ending_slurm.calls("squeue")) == 1 + 3


def test_jobs_that_have_ended_meanwhile_are_no_fault(ending_slurm: SlurmCommands) -> None:
    for name in ("scontrol", "scancel"):
        ending_slurm.answer(name, fails=GONE)
    ending_slurm.answer("squeue")
    said: list[str] = []
    end_jobs({"1": 180, "2": 0}, said.append)
    assert said == []
    end_jobs({}, said.append)
    assert said == []


def test_ctrl_c_ends_all_at_once(ending_slurm: SlurmCommands) -> None:
    ending_slurm.answer("squeue", queue(j1="RUNNING", j2="PENDING"))
    keys: Iterator[BaseException] = iter([KeyboardInterrupt()])

    def say(text: str) -> None:
        raise next(keys)

    end_jobs({"1": 180, "2": 0}, say)
    assert ending_slurm.calls("scancel") == ["scancel --state=PENDING 1 2", "scancel 1 2"]


def test_an_outage_names_the_jobs_that_may_still_run(ending_slurm: SlurmCommands) -> None:
    ending_slurm.answer("scontrol", fails=OUTAGE)
    said: list[str] = []
    end_jobs({"1": 180, "2": 0}, said.append)
    assert said == [f"scontrol: {OUTAGE}; these jobs may still run: 1 2. scancel ends them."]
    assert ending_slurm.calls("scancel") == []


@pytest.mark.parametrize(
    ("state", "how", "again", "taken_away"),
    [
        ("BOOT_FAIL", "lost", True, True),
        ("CANCELLED", "refused", False, False),
        ("CANCELLED by 1000", "refused", False, False),
        ("DEADLINE", "out of time", False, False),
        ("FAILED", "failed", True, False),
        ("NODE_FAIL", "lost", True, True),
        ("OUT_OF_MEMORY", "out of memory", True, False),
        ("PREEMPTED", "preempted", True, True),
        ("REVOKED", "lost", True, True),
        ("TIMEOUT", "out of time", True, False),
        ("A_STATE_OF_TOMORROW", "failed", True, False),
    ],
)
def test_each_state_says_whether_another_attempt_may_help(
    tmp_path: Path, state: str, how: str, again: bool, taken_away: bool
) -> None:
    ended = ended_of(state, tmp_path / "none")
    assert ended is not None
    assert (ended.how, ended.again, ended.taken_away) == (how, again, taken_away)
    assert ended.cause


@pytest.mark.parametrize(
    ("reason", "log", "verdict", "how", "cause"),
    [
        (
            "NonZeroExitCode",
            "slurmstepd: error: Detected 1 oom-kill event(s) in step 7.0 cgroup. Some of",
            "",
            "out of memory",
            "",
        ),
        (
            "",
            "x\nDetected 1 oom_kill event in StepId=7.batch. Some of the step tasks have been OOM Killed.",
            "",
            "out of memory",
            "",
        ),
        ("", "", '{"no_memory": true, "again": false}', "out of memory", ""),
        ("JobLaunchFailure", "", "", "failed", "Slurm did not start it: JobLaunchFailure"),
        ("NonZeroExitCode", "the model is out of memory", "", "failed", "its stage failed"),
    ],
)
def test_an_end_is_judged_by_reason_log_and_the_kernels_count(
    tmp_path: Path, reason: str, log: str, verdict: str, how: str, cause: str
) -> None:
    """Slurm calls a job FAILED whose step ran out of memory."""
    (tmp_path / "7.json").write_text(verdict)
    ended = ended_of("FAILED", tmp_path / "7.json", reason, log)
    assert ended is not None
    assert (ended.how, ended.again) == (how, True)
    assert cause in ended.cause


@pytest.mark.parametrize("state", ["TIMEOUT", "DEADLINE", "NODE_FAIL", "FAILED", "OUT_OF_MEMORY"])
def test_a_limit_that_a_job_without_a_save_has_reached_is_not_tried_again(tmp_path: Path, state: str) -> None:
    ended = ended_of(state, tmp_path / "none")
    assert ended is not None
    without = without_a_save(ended, "merge_weights")
    assert (without.again, "--set-resources merge_weights:runtime=MINUTES" in without.cause) == (
        (False, True) if state == "TIMEOUT" else (ended.again, False)
    )


def killed_meanwhile(folder: Path, own: str, file: str, kills: int, in_pod: bool = False) -> bool:
    """Return whether a job sees some kills in a file of its control groups, which has two of before."""
    (folder / "own").write_text(f"{own}\n")
    counts = folder / file
    counts.parent.mkdir(parents=True, exist_ok=True)
    counts.write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    killed = memory_kills(folder / "own", folder, in_pod)
    assert not killed()
    counts.write_text(f"oom_kill_disable 0\nunder_oom 0\noom_kill {2 + kills}\n")
    return killed()


@pytest.mark.parametrize(
    ("own", "file", "kills", "killed"),
    [
        ("0::/system.slice/job_7/step_0/user/task_0", "system.slice/job_7/step_0/memory.events", 1, True),
        ("0::/system.slice/job_7/step_0/user/task_0", "system.slice/job_7/step_0/memory.events", 0, False),
        ("4:memory:/slurm/uid_0/job_7/step_0/task_0", "memory/slurm/uid_0/job_7/memory.oom_control", 2, True),
        ("4:memory:/slurm/uid_0/job_7/step_0", "memory/slurm/uid_0/memory.oom_control", 2, False),
        ("3:devices:/slurm/uid_0/job_7", "memory/slurm/uid_0/job_7/memory.oom_control", 2, False),
    ],
)
def test_the_kernels_count_of_killed_processes(tmp_path: Path, own: str, file: str, kills: int, killed: bool) -> None:
    assert killed_meanwhile(tmp_path, own, file, kills) is killed
    assert not memory_kills(tmp_path / "none", tmp_path)()


@pytest.mark.parametrize(
    ("own", "file"),
    [("0::/", "memory.events"), ("9:memory:/kubepods/pod1/container", "memory/memory.oom_control")],
)
def test_in_a_pod_the_folder_of_control_groups_is_the_containers(tmp_path: Path, own: str, file: str) -> None:
    assert killed_meanwhile(tmp_path, own, file, 1, in_pod=True)
    assert not killed_meanwhile(tmp_path, own, file, 0, in_pod=True)


def test_a_job_that_succeeded_did_so_whatever_its_stage_left(tmp_path: Path) -> None:
    (tmp_path / "7.json").write_text('{"again": false}')
    assert ended_of("COMPLETED", tmp_path / "7.json") is None


@pytest.mark.parametrize(
    ("verdict", "again", "cause"),
    [
        ('{"again": false}', False, "its stage failed"),
        ('{"again": false, "why": "it saved nothing"}', False, "it saved nothing"),
        ('{"saved": true}', True, "its stage failed"),
        ('{"again": 0, "why": ""}', True, "its stage failed"),
        ('{"why": "a\\u001b[2Jb\\u202ec"}', True, "a\ufffd[2Jb\ufffdc"),
    ],
)
def test_a_stage_says_itself_whether_it_would_fail_again(tmp_path: Path, verdict: str, again: bool, cause: str) -> None:
    (tmp_path / "7.json").write_text(verdict)
    ended = ended_of("FAILED", tmp_path / "7.json")
    assert ended is not None
    assert (ended.how, ended.again, ended.cause) == ("failed", again, cause)


@pytest.mark.parametrize(
    "verdict",
    [
        b"",
        b"not JSON",
        b"\xff\xfe",
        b'["again", false]',
        b"false",
        b"[" * 900,
        b'{"again": false, "why": "' + b"x" * 10_000_000 + b'"}',
        b'{"again": false}' + b" " * 10_000_000,
    ],
    ids=["empty", "text", "bytes", "list", "word", "deep", "huge", "huge at its end"],
)
def test_a_verdict_that_is_none_says_nothing(tmp_path: Path, verdict: bytes) -> None:
    (tmp_path / "7.json").write_bytes(verdict)
    assert read_verdict(tmp_path / "7.json") == {}
    ended = ended_of("FAILED", tmp_path / "7.json")
    assert ended is not None
    assert ended.again


def test_a_place_that_holds_no_file_says_nothing(tmp_path: Path) -> None:
    assert read_verdict(tmp_path) == read_verdict(tmp_path / "none") == {}
