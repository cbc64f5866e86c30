"""Each patch of Snakemake still has its reason: the tests fail when upstream no longer needs it."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import snakemake_storage_plugin_fs
from snakemake_interface_executor_plugins.registry import ExecutorPluginRegistry
from snakemake_interface_storage_plugins.storage_provider import StorageProviderBase

from forked_snakemake import called
from vlmflow.harness import patches
from vlmflow.remote.storage.plugins import FsObject
from workflow_runs import ROOT


def write(folder: Path, snakefile: str) -> None:
    """Write a Snakefile that can use `patches`."""
    head = f"import sys; sys.path.insert(0, {str(ROOT / 'scripts')!r})\nfrom vlmflow.harness import patches\n"
    (folder / "Snakefile").write_text(head + snakefile)


def snakemake(folder: Path, snakefile: str, *words: str) -> str:
    """Run Snakemake in a folder on a Snakefile (`write`), and return its output."""
    write(folder, snakefile)
    call = [sys.executable, "-m", "snakemake", "--cores", "1", "--rerun-triggers", "params", "--keep-incomplete"]
    done = called([*call, *words], cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


HOOKS = """
rule all:
    output: "all.txt"
    shell: "touch {output}"
onstart: print("onstart")
onsuccess: print("onsuccess")
"""

AROUND = """
def around(plan):
    print("before")
    plan()
    print("after", len(workflow.dag))
patches.around_planning(workflow, around)
"""


def test_no_hook_is_called_with_a_dry_run(tmp_path: Path) -> None:
    """`around_planning`."""
    said = snakemake(tmp_path, HOOKS + AROUND, "-n")
    assert "onstart" not in said
    assert "onsuccess" not in said
    assert said.index("before\n") < said.index("after 1\n")


ANCIENT = """
rule c:
    input: ancient("a.txt")
    output: "c.txt"
    params: x=config.get("val", 1)
    shell: "touch {output}"
rule a:
    output: "a.txt"
    params: x=config.get("val", 1)
    shell: "touch {output}"
"""
"""The lines of the report in docs/decisions.md."""

COMPARED = """
def around(plan):
    patches.compare_past_ancient_inputs(workflow.dag)
    plan()
patches.around_planning(workflow, around)
"""


def planned(said: str) -> set[str]:
    return {line.split()[1].rstrip(":") for line in said.splitlines() if line.startswith("rule ")}


def test_a_job_behind_an_ancient_input_is_forgotten(tmp_path: Path) -> None:
    """`compare_past_ancient_inputs`."""
    snakemake(tmp_path, ANCIENT)
    assert planned(snakemake(tmp_path, ANCIENT, "-n", "--config", "val=2")) == {"a"}
    assert planned(snakemake(tmp_path, ANCIENT + COMPARED, "-n", "--config", "val=2")) == {"a", "c"}
    snakemake(tmp_path, ANCIENT, "--config", "val=2")  # for good: `a` is up to date now, and `c` is compared
    assert planned(snakemake(tmp_path, ANCIENT, "-n", "--config", "val=2")) == {"c"}


CHAIN = """
rule best:
    input: "result.txt"
    output: "best.txt"
    shell: "touch {output}"
rule result:
    output: "result.txt"
    shell: "touch {output}"
"""

ASKED = """
def around(plan):
    patches.ask_for(workflow, ["result.txt"])
    plan()
patches.around_planning(workflow, around)
"""


def test_a_missing_file_between_others_is_left_alone(tmp_path: Path) -> None:
    """`ask_for`."""
    snakemake(tmp_path, CHAIN, "best.txt")
    (tmp_path / "result.txt").unlink()
    assert planned(snakemake(tmp_path, CHAIN, "-n", "best.txt")) == set()
    assert "result" in planned(snakemake(tmp_path, CHAIN + ASKED, "-n", "best.txt"))


def test_a_provider_asks_its_plugins_module_for_the_class_of_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    """`store_by`."""
    theirs = FsObject.__base__
    monkeypatch.setattr(snakemake_storage_plugin_fs, "StorageObject", theirs)  # other tests have replaced it
    provider = snakemake_storage_plugin_fs.StorageProvider
    assert provider.get_storage_object_cls.__func__ is StorageProviderBase.get_storage_object_cls.__func__
    assert provider.get_storage_object_cls() is theirs

    patches.store_by(FsObject)
    assert provider.get_storage_object_cls() is FsObject


EXECUTOR = """
from snakemake_interface_executor_plugins.registry import ExecutorPluginRegistry
print("read with", workflow.executor_plugin)
patches.watch_executor(ExecutorPluginRegistry().get_plugin("slurm"), lambda: print("named"), None)
rule all:
    output: "all.txt"
    shell: "touch {output}"
onstart: print("never")
"""


def test_a_workflow_is_read_without_its_executor_and_planned_with_another(tmp_path: Path) -> None:
    """`watch_executor`."""
    around = "def around(plan):\n    plan()\n    print('planned with', workflow.executor_plugin.name)\n"
    snakefile = EXECUTOR + around + "patches.around_planning(workflow, around)\n"
    said = snakemake(tmp_path, snakefile, "-n", "--executor", "slurm", "--jobs", "1")
    assert "read with None" in said
    assert said.index("named") < said.index("planned with dryrun")
    assert "named" not in snakemake(tmp_path, snakefile, "-n")


def test_an_executor_is_replaced_when_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = ExecutorPluginRegistry().get_plugin("slurm")
    for name in ("executor", "validate_settings"):
        monkeypatch.setattr(plugin, name, getattr(plugin, name))
    made: list[tuple[str, str]] = []
    patches.watch_executor(
        plugin, lambda: None, lambda: setattr(plugin, "executor", lambda *values: made.append(values))
    )
    assert not made
    plugin.executor("workflow", "logger")
    assert made == [("workflow", "logger")]


WAITS = """
rule all:
    output: "all.txt"
    shell: "trap 'echo the job hears of it >&2' TERM; touch begun; sleep 1; touch {output}"
"""

LOCKED = """
import os, signal, threading
from snakemake.scheduling.job_scheduler import JobScheduler

plain = JobScheduler._finish_jobs

def told_while_locked(scheduler):
    if {when}:
        os.kill(os.getpid(), signal.SIGTERM)
    plain(scheduler)

JobScheduler._finish_jobs = told_while_locked
"""
"""Sends SIGTERM to Snakemake while its main thread holds its lock: at the first round, or when the first job ends."""


@pytest.mark.parametrize("when", ["not scheduler.running", "scheduler._tofinish"])
def test_a_snakemake_that_holds_its_lock_ends_when_it_is_told(tmp_path: Path, when: str) -> None:
    """`only_note_sigterm`."""
    rules = "rule all:\n    input: 'two'\nrule one:\n    output: 'one'\n    shell: 'touch one'\n"
    rules += "rule two:\n    input: 'one'\n    output: 'two'\n    shell: 'touch two'\n"
    write(tmp_path, "patches.only_note_sigterm()\n" + LOCKED.format(when=when) + rules)
    call = [sys.executable, "-m", "snakemake", "--cores", "1"]
    with subprocess.Popen(call, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            said = process.communicate(timeout=60)[0]
        finally:
            process.kill()
    assert "Will exit after finishing currently running jobs" in said
    assert not (tmp_path / "two").exists()
    assert process.returncode == 1


TOLD = "patches.on_sigterm(lambda: print('the workflow hears of it'))\n"


def test_no_job_hears_of_sigterm(tmp_path: Path) -> None:
    """`on_sigterm`. A shell runs its trap when `sleep` has ended."""
    write(tmp_path, TOLD + WAITS)
    with subprocess.Popen(
        [sys.executable, "-m", "snakemake", "--cores", "1"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        while not (tmp_path / "begun").exists() and process.poll() is None:
            time.sleep(0.05)
        process.terminate()
        said = process.communicate()[0]
    assert (tmp_path / "all.txt").exists()
    assert "the job hears of it" not in said
    assert "the workflow hears of it" in said


STAGES = """
patches.only_note_sigterm()
{patch}
rule all:
    input: expand("{{n}}.txt", n=range({stages}))
rule stage:
    output: "{{n}}.txt"
    params: seconds={seconds}
    script: "stage.py"
"""

STAGE = """
import os, signal, sys, time
from pathlib import Path

def told(*_):
    print("told", flush=True)
    sys.exit(3)

signal.signal(signal.SIGTERM, told)
first = not list(Path().glob("*.txt"))
Path("first" if first else "second").touch()
time.sleep(0.1 if first or Path("again").exists() else snakemake.params.seconds)
Path(snakemake.output[0]).touch()
"""


def begin(folder: Path, patch: str, stages: int, seconds: float) -> "subprocess.Popen[str]":
    """Start Snakemake on stages of which the first is short, and the others take some seconds each."""
    write(folder, STAGES.format(patch=patch, stages=stages, seconds=seconds))
    (folder / "stage.py").write_text(STAGE)
    call = [sys.executable, "-m", "snakemake", "--cores", "1"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(call, cwd=folder, text=True, start_new_session=True, **pipes)


def ended(process: "subprocess.Popen[str]", sent: signal.Signals, within: float) -> str:
    """Send a signal to Snakemake alone; return what was said until its end, which must come within some seconds."""
    process.send_signal(sent)
    try:
        return process.communicate(timeout=within)[0]
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def told_in_second(folder: Path, patch: str, seconds: float, sent: signal.Signals) -> str:
    """Send a signal to Snakemake alone while its second stage runs; return what was said until its end."""
    with begin(folder, patch, 2, seconds) as process:
        while not (folder / "second").exists() and process.poll() is None:
            time.sleep(0.05)
        return ended(process, sent, 60)


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_stage_hears_what_snakemake_alone_is_told(tmp_path: Path, sent: signal.Signals) -> None:
    """`tell_stages_to_end`. Without it the stage goes on to its end."""
    said = told_in_second(tmp_path, "patches.tell_stages_to_end()", 300, sent)
    assert "told" in said
    assert len(list(tmp_path.glob("*.txt"))) == 1


def test_a_stage_that_begins_after_the_signal_hears_of_it(tmp_path: Path) -> None:
    """Here its shell has begun, and does something before it; Snakemake waits for both."""
    slow = "if ls *.txt >/dev/null 2>&1; then touch second; sleep 2; fi;"
    patch = f"from snakemake.shell import shell\nshell.prefix({slow!r})\npatches.tell_stages_to_end()"
    told_in_second(tmp_path, patch, 300, signal.SIGTERM)
    assert len(list(tmp_path.glob("*.txt"))) == 1


def test_upstream_tells_no_stage_of_ctrl_c(tmp_path: Path) -> None:
    assert "told" not in told_in_second(tmp_path, "", 3, signal.SIGINT)
    assert len(list(tmp_path.glob("*.txt"))) == 2


def moments(count: int) -> list[Any]:
    """Return numbers from 0 to below 1, of `count` equal moments of a run."""
    return [number / count for number in range(count)]


@pytest.fixture(scope="session")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> float:
    """The seconds of a workflow of three short stages."""
    began = time.monotonic()
    with begin(tmp_path_factory.mktemp("whole"), "patches.tell_stages_to_end()", 3, 0.1) as process:
        process.communicate()
    assert process.returncode == 0
    return time.monotonic() - began


def ends_when_told(folder: Path, moment: float, whole: float, sent: signal.Signals) -> None:
    """Send a signal to Snakemake at a moment of a run; check that it ends, and that a second run finishes the work.

    By itself a stage after the first would outlast GRACE, also one that begins just after the signal.
    """
    with begin(folder, "patches.tell_stages_to_end()", 3, 2 * GRACE) as process:
        time.sleep(moment * whole)
        ended(process, sent, GRACE)
    (folder / "again").touch()
    again = [sys.executable, "-m", "snakemake", "--cores", "1", "--nolock", "--rerun-incomplete"]
    done = called(again, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list(folder.glob("*.txt"))) == 3


GRACE = 30.0
"""Seconds that Kubernetes and Slurm give a process between SIGTERM and SIGKILL."""


@pytest.mark.parametrize("moment", moments(20))
def test_snakemake_ends_at_any_moment_of_a_run(moment: float, whole_run: float, tmp_path: Path) -> None:
    """Also before it handles signals, while it plans, between two stages, and at its own end."""
    ends_when_told(tmp_path, moment, whole_run, signal.SIGTERM)


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_snakemake_ends_at_a_thousand_moments(sent: signal.Signals, whole_run: float, tmp_path: Path) -> None:
    for number, moment in enumerate(moments(500)):
        (folder := tmp_path / str(number)).mkdir()
        ends_when_told(folder, moment, whole_run, sent)
