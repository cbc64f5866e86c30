"""Snakemake on targets that are in a storage: as one process, and as a pod."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from made_accounts import some_provenance
from storage_runs import make_run, other_file_system
from vlmflow.core.account import write_account

WORKFLOW = """
from pathlib import Path
from vlmflow.harness.inputs import as_inputs

rule all:
    input: "merged/x"
    localrule: True

rule rows:
    input: lambda wildcards: as_inputs(workflow, [Path(config["source"]), Path("/not/here")])
    output: "data/rows.txt"
    log: "logs/rows.log"
    shell: "cp {input} {output}; stat -c %i {output} > {log}"

rule folder:
    input: "data/rows.txt"
    output: temp(directory("work/x"))
    log: "logs/folder.log"
    benchmark: "benchmarks/folder.tsv"
    shell: "readlink {input} > {log}; mkdir {output}; cat {input} > {output}/rows; stat -c %i {output}/rows >> {log}"

rule merged:
    input: "work/x"
    output: directory("merged/x")
    log: "logs/merged.log"
    shell: "mkdir -p {output}/inner; cp {input}/rows {output}/inner/rows; readlink {input} > {log}"
"""


def test_inputs_are_links_and_outputs_are_renamed(tmp_path: Path) -> None:
    run = make_run(tmp_path, WORKFLOW)
    source = tmp_path / "cache" / "source.txt"
    source.parent.mkdir()
    source.write_text("first\n")
    run.run("--config", f"source={source}")
    logs, merged = run.targets / "logs", run.targets / "merged" / "x"
    assert int((logs / "rows.log").read_text()) == (run.targets / "data" / "rows.txt").stat().st_ino
    assert (logs / "folder.log").read_text().split()[0] == str(run.targets / "data" / "rows.txt")
    assert (logs / "merged.log").read_text().split() == [str(run.targets / "work" / "x")]
    assert (merged / "inner" / "rows").read_text() == "first\n"
    assert (run.targets / "benchmarks" / "folder.tsv").read_text().startswith("s\t")
    assert not (run.targets / "work" / "x").exists()  # temporary
    assert [place for place in run.local.rglob("*") if place.is_file() and not place.is_symlink()] == []

    assert "Nothing to be done" in run.run("--config", f"source={source}")
    before = os.open(merged, os.O_RDONLY)  # while it is open, no other file gets its number
    source.write_text("second\n")
    run.run("--config", f"source={source}")
    assert (merged / "inner" / "rows").read_text() == "second\n"
    assert merged.stat().st_ino != os.fstat(before).st_ino
    os.close(before)
    assert {place.name for place in merged.parent.iterdir()} == {"x"}


POD = """
rule made:
    input: "given"
    output: directory("made")
    log: "logs/made.log"
    params: fails=config.get("fails", 0)
    shell: "mkdir {output}; cp {input}/* {output}; echo said > {log}; exit {params.fails}"
"""


def test_a_pod_stores_its_outputs_and_leaves_no_folder_behind(tmp_path: Path) -> None:
    run = make_run(tmp_path, POD)
    (run.targets / "given").mkdir()
    (run.targets / "given" / "rows").write_text("rows")
    run.call(run.as_pod("made"))
    assert (run.targets / "made" / "rows").read_text() == "rows"
    assert (run.targets / "logs" / "made.log").read_text() == "said\n"
    assert list(run.local.parent.iterdir()) == []


def test_a_pod_that_fails_stores_only_its_log(tmp_path: Path) -> None:
    run = make_run(tmp_path, POD)
    (run.targets / "given").mkdir()
    (run.targets / "given" / "rows").write_text("rows")
    run.call(run.as_pod("made", "--config", "fails=3"), ends_well=False)
    assert not (run.targets / "made").exists()
    assert (run.targets / "logs" / "made.log").read_text() == "said\n"
    assert list(run.local.parent.iterdir()) == []


LATE = """
rule made:
    output: "made"
    shell: "echo 'of the next attempt' > {config[target]}; exit 3"
"""


def test_a_pod_that_fails_late_leaves_the_target_of_the_next_attempt(tmp_path: Path) -> None:
    """A lost node came back: its pod must end after another attempt made the target elsewhere."""
    run = make_run(tmp_path, LATE)
    target = run.targets / "made"
    target.write_text("of an earlier call")
    run.call(run.as_pod("made", "--config", f"target={target}"), ends_well=False)
    assert target.read_text() == "of the next attempt\n"


def test_a_pod_that_fails_leaves_no_target_of_an_earlier_call(tmp_path: Path) -> None:
    """It would count as the result of the failed call."""
    run = make_run(tmp_path, POD)
    (run.targets / "given").mkdir()
    (run.targets / "given" / "rows").write_text("rows")
    run.call(run.as_pod("made"))
    run.call(run.as_pod("made", "--config", "fails=3"), ends_well=False)
    assert not (run.targets / "made").exists()


SLOW = """
if config.get("slow"):
    import time
    from vlmflow.remote.storage import in_place
    sync = in_place.sync
    in_place.sync = lambda place: (time.sleep(0.5 if ".part" in str(place) else 0), sync(place))
"""
"""Half a second per copied file, so that the kill is certainly in the middle."""


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Path]:
    with other_file_system(tmp_path) as folder:
        yield folder


def test_a_pod_that_is_killed_in_the_middle_of_the_store(tmp_path: Path, elsewhere: Path) -> None:
    """The target is missing; the next pod makes it, and a pod one day later removes the first one's leftovers."""
    run = make_run(tmp_path, SLOW + POD, local=elsewhere)
    (run.targets / "given").mkdir()
    for number in range(50):
        (run.targets / "given" / str(number)).write_bytes(b"w" * 2_000_000)
    slow = run.as_pod("made", "--config", "slow=1")
    pod = subprocess.Popen(slow, **run.place(), stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
    while not (parts := list(run.targets.glob(".made.*.part"))):
        assert pod.poll() is None
        time.sleep(0.0005)
    pod.send_signal(signal.SIGKILL)
    pod.wait()
    assert len(list(parts[0].iterdir())) < 50
    assert not (run.targets / "made").exists()
    shutil.rmtree(run.local)  # another pod has another folder

    run.call(run.as_pod("made"))
    assert {place.name for place in run.targets.iterdir()} == {"given", "made", "logs", parts[0].name}
    assert len(list((run.targets / "made").glob("[0-9]*"))) == 50


SAID = """
onerror:
    from vlmflow.remote.storage.plugins import text_of
    for job in workflow.scheduler.failed:
        print([text_of(log) for log in job.log])
"""


def test_the_main_process_reads_the_log_of_a_failed_job(tmp_path: Path) -> None:
    run = make_run(tmp_path, POD + SAID)
    (run.targets / "given").mkdir()
    (run.targets / "given" / "rows").write_text("rows")
    assert "['said\\n']" in run.call(run.command("--config", "fails=3"), ends_well=False)


FINISHED = """
from types import SimpleNamespace
from vlmflow.harness import start

rule publish_merged:
    input: "given/{run}"
    output: directory("merged/{run}")
    shell: "cp -r $(readlink {input}) {output}"

onsuccess:
    start.after_success(workflow, SimpleNamespace(runs={"mine": SimpleNamespace(dataset="fire")}))
"""


def test_the_summary_is_read_from_the_storage(tmp_path: Path) -> None:
    """On a cluster it is the end of the controller's log. What a job may have planted is named, and not followed."""
    run = make_run(tmp_path, FINISHED)
    write_account(run.targets / "given/mine/provenance.json", some_provenance())
    (run.targets / "reports").mkdir()
    (run.targets / "reports/run-mine.html").touch()
    said = run.run("merged/mine")
    assert "\nmine is done.\n  rows        train: 1 in, 1 kept, 0 rejected\n" in said
    assert f"\n  pages       {run.targets}/reports/run-mine.html\n  weights     {run.targets}/merged/mine (" in said

    shutil.rmtree(run.targets / "merged")
    (run.targets / "eval/mine/val").mkdir(parents=True)
    (run.targets / "eval/mine/val/report.json").symlink_to(tmp_path / "secret")
    said = run.run("merged/mine")
    assert "\nmine is done. Its summary cannot be shown: VlmflowError: " in said
    assert f"{run.targets}/eval/mine/val/report.json is a link" in said
