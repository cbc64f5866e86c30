"""Faults of Slurm and of Snakemake while small jobs run: none is lost, none doubled, none tried in vain."""

import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

from cluster.shell import wait_for
from slurm.slurm_cluster import SlurmCluster
from slurm.slurm_workflow import PROFILE, Call
from workflow_runs import ROOT

pytestmark = pytest.mark.slow

RULES = Path(__file__).with_name("faults.smk")

FAILS = """#!/bin/sh
# Fails as long as there are lines in `left`: this takes one of them.
if [ -s {folder}/left ]; then
    sed -i 1d {folder}/left
    echo '{says}' >&2
    exit 1
fi
exec {real} "$@"
"""

WAITS = """#!/bin/sh
touch {folder}/asked
until [ -e {folder}/may ]; do sleep 0.1; done
exec {real} "$@"
"""

LOSES_ITS_ANSWER = """#!/bin/sh
{real} "$@" > {folder}/answer || exit
if [ -e {folder}/lost ]; then
    cat {folder}/answer
else
    touch {folder}/lost
    echo '{says}' >&2
    exit 1
fi
"""

NO_ANSWER = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
LOST_ANSWER = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a working directory with the small rules."""
    shutil.copyfile(RULES, tmp_path / "Snakefile")
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    return tmp_path


def call(folder: Path, *words: str, path: Path | None = None) -> Call:
    """Start Snakemake on the small rules. path: a folder of programs that come before Slurm's."""
    places = ["--snakefile", str(folder / "Snakefile"), "--directory", str(folder), "--profile", str(PROFILE)]
    environment = {"PATH": f"{path}{os.pathsep}{os.environ['PATH']}"} if path else {}
    return Call(folder, [sys.executable, "-m", "snakemake", *places, "--max-threads", "2", *words], environment)


def wrapped(folder: Path, name: str, text: str, **words: object) -> Path:
    """Write a program that comes before one of Slurm's, and return its folder."""
    program = folder / "programs" / name
    program.parent.mkdir()
    program.write_text(text.format(folder=folder, real=shutil.which(name), **words))
    program.chmod(0o755)
    return program.parent


def begun(folder: Path, name: str) -> list[str]:
    """Return the jobs that have begun to make a target, one for each start."""
    file = folder / f"{name}.begun"
    return file.read_text().split() if file.exists() else []


def started(run: Call, name: str, times: int = 1) -> str:
    """Wait until a target has been begun so many times, and return the last one's job."""
    run.until(f"{name} has begun", lambda: len(begun(run.folder, name)) == times)
    return begun(run.folder, name)[-1]


def test_ten_queries_without_an_answer_lose_no_job(slurm: SlurmCluster, folder: Path) -> None:
    programs = wrapped(folder, "squeue", FAILS, says=NO_ANSWER)
    run = call(folder, "--", "one.follows", path=programs)
    started(run, "one")
    (folder / "left").write_text("once more\n" * 10)
    run.until("ten queries have failed", lambda: (folder / "left").stat().st_size == 0, 120)
    (folder / "one.enough").touch()
    said = run.end()
    assert said.count(NO_ANSWER) == 1
    assert [job.state for job in run.jobs("waits", "follows")] == ["COMPLETED", "COMPLETED"]


def test_a_run_outlives_the_controller(slurm: SlurmCluster, folder: Path) -> None:
    run = call(folder, "--", "one.follows")
    started(run, "one")
    slurm.stop_controller()
    run.wait_for("Unable to contact slurm controller")
    (folder / "one.enough").touch()
    slurm.start_controller()
    run.end()
    assert len(begun(folder, "one")) == 1
    assert [job.name for job in run.jobs("waits", "follows")] == ["waits:one", "follows:one"]


def test_a_submission_waits_for_the_controller(slurm: SlurmCluster, folder: Path) -> None:
    programs = wrapped(folder, "sbatch", WAITS)
    run = call(folder, "--", "one.txt", path=programs)
    run.until("Snakemake submits", (folder / "asked").exists)
    slurm.stop_controller()
    (folder / "may").touch()
    run.wait_for("trying again")
    slurm.start_controller()
    (folder / "one.enough").touch()
    run.end()
    assert len(begun(folder, "one")) == 1


def test_a_submission_whose_answer_is_lost_is_not_repeated(slurm: SlurmCluster, folder: Path) -> None:
    programs = wrapped(folder, "sbatch", LOSES_ITS_ANSWER, says=LOST_ANSWER)
    run = call(folder, "--", "one.txt", path=programs)
    run.wait_for("Socket timed out on send/recv operation; trying again")
    (folder / "one.enough").touch()
    run.end()
    assert [job.state for job in run.jobs("waits")] == ["COMPLETED"]


@pytest.mark.parametrize("groups", [[], ["--groups", "waits=both", "follows=both"]])
def test_a_killed_snakemake_finds_its_job_again(slurm: SlurmCluster, folder: Path, groups: list[str]) -> None:
    first = call(folder, *groups, "--", "one.follows")
    started(first, "one")
    first.process.kill()
    first.process.wait()
    run = call(folder, *groups, "--", "one.follows")
    run.wait_for(f"job {begun(folder, 'one')[0]} of an earlier call makes it")
    (folder / "one.enough").touch()
    run.end()
    assert len(begun(folder, "one")) == 1
    assert len(run.jobs("waits", "follows", "both")) == (1 if groups else 2)


def test_what_a_job_made_after_snakemake_was_killed_counts(slurm: SlurmCluster, folder: Path) -> None:
    first = call(folder, "--", "one.follows")
    started(first, "one")
    first.process.kill()
    first.process.wait()
    (folder / "one.enough").touch()
    slurm.wait_for_job(begun(folder, "one")[0], "COMPLETED")
    call(folder, "--", "one.follows").end()
    assert len(begun(folder, "one")) == 1


def test_other_settings_end_the_job_of_a_killed_snakemake(slurm: SlurmCluster, folder: Path) -> None:
    first = call(folder, "--", "one.txt")
    started(first, "one")
    first.process.kill()
    first.process.wait()
    changed = ("--config", "runs={qwen3vl-fire: {train: {learning_rate: 3e-5}}}")
    run = call(folder, *changed, "--", "one.txt")
    started(run, "one", times=2)
    (folder / "one.enough").touch()
    said = run.end()
    earlier, now = run.jobs("waits")
    assert f"ending job {earlier.id} of an earlier call, which makes it otherwise" in said
    assert (earlier.state, now.state) == ("CANCELLED", "COMPLETED")


def test_jobs_that_slurm_forgot_are_judged_by_their_targets(slurm: SlurmCluster, folder: Path) -> None:
    """Both end while Snakemake sleeps: one has made its target; the other, which failed, none."""
    with slurm.configured(MinJobAge=2):
        run = call(folder, "--retries", "0", "--", "one.txt", "two.stumbled")
        started(run, "one")
        run.process.send_signal(signal.SIGSTOP)
        (folder / "one.enough").touch()
        wait_for("Slurm has forgotten both", lambda: not run.jobs("waits", "stumbles"), 180, pause=1)
        run.process.send_signal(signal.SIGCONT)
        said = run.end()
    assert len(begun(folder, "one")) == 1
    assert len(set(begun(folder, "two"))) == 2
    assert "Slurm no longer knows it, and it made no target" in said
    assert "this uses no retry" in said


def test_sigterm_ends_all_jobs(slurm: SlurmCluster, folder: Path) -> None:
    """One runs, the other waits until a core is free. The next call does not follow them while they end."""
    slurm.submit("sleep 1000", "--exclusive", "--nodelist=node-a", "--time=10")
    slurm.submit("sleep 1000", "--nodelist=node-b", "--time=10")
    with slurm.configured(KillWait=60):
        run = call(folder, "--", "one.txt", "two.txt")
        run.until("both are submitted", lambda: len(run.jobs("waits")) == 2)
        run.until("one runs", lambda: begun(folder, "one") + begun(folder, "two"))
        run.process.send_signal(signal.SIGTERM)
        run.end(1, limit=30)
        again = call(folder, "--", "one.txt", "two.txt")
        again.wait_for("waiting for jobs of an earlier call to end: waits:")
        for name in ("one", "two"):
            (folder / f"{name}.enough").touch()
        again.end()
        assert [job.state for job in run.jobs("waits")] == ["CANCELLED"] * 2 + ["COMPLETED"] * 2


def test_jobs_that_snakemake_could_not_end_are_named_and_found_again(slurm: SlurmCluster, folder: Path) -> None:
    first = call(folder, "--", "one.txt")
    number = started(first, "one")
    slurm.stop_controller()
    first.process.send_signal(signal.SIGTERM)
    assert f"these jobs may still run: {number}. scancel ends them." in first.end(1)
    slurm.start_controller()
    run = call(folder, "--", "one.txt")
    run.wait_for(f"job {number} of an earlier call makes it")
    (folder / "one.enough").touch()
    run.end()
    assert begun(folder, "one") == [number]


def test_a_cancelled_job_ends_the_run(slurm: SlurmCluster, folder: Path) -> None:
    run = call(folder, "--", "one.follows")
    started(run, "one")
    slurm.run("scancel", begun(folder, "one")[0])
    said = run.end(1)
    assert "it was cancelled (scancel)" in said
    assert [job.state for job in run.jobs("waits")] == ["CANCELLED"]


def test_what_slurm_refuses_is_said_and_not_tried_again(slurm: SlurmCluster, folder: Path) -> None:
    run = call(folder, "--", "one.follows")
    started(run, "one")
    slurm.run("scontrol", "update", "PartitionName=cpu", "State=DRAIN")
    try:
        (folder / "one.enough").touch()
        said = run.end(1)
        planned = call(folder, "--", "one.follows").end(1)
    finally:
        slurm.run("scontrol", "update", "PartitionName=cpu", "State=UP")
    assert said.count("Batch job submission failed") == 1
    assert "This job is not retried" in said
    assert "follows, partition cpu: it takes no new jobs (DRAIN)" in planned


def test_a_stage_that_would_fail_again_is_not_retried(slurm: SlurmCluster, folder: Path) -> None:
    said = call(folder, "--", "one.closed").end(1)
    assert "the gate of one.closed is closed" in said
    assert len(begun(folder, "one")) == 1


def test_a_failed_stage_is_retried(slurm: SlurmCluster, folder: Path) -> None:
    said = call(folder, "--", "one.stumbled").end()
    assert said.count("Trying to restart job") == 1
    assert len(begun(folder, "one")) == 2
