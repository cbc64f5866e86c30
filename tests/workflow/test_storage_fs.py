import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness.storage import fs_object, no_links
from harness.storage.stored_text import text_of
from storage_runs import make_run, other_file_system
from vlmflow.core.errors import VlmflowError

ROAD = """
from pathlib import Path
from harness.storage.volume_inputs import as_inputs

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
    run = make_run(tmp_path, ROAD)
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
    before = os.open(merged, os.O_RDONLY)  # while it is open, nothing else gets its number
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


def test_a_pod_that_fails_stores_its_log_alone(tmp_path: Path) -> None:
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
    """A lost node came back: its pod is told to end after the job was tried again elsewhere, and made."""
    run = make_run(tmp_path, LATE)
    target = run.targets / "made"
    target.write_text("of an earlier call")
    run.call(run.as_pod("made", "--config", f"target={target}"), ends_well=False)
    assert target.read_text() == "of the next attempt\n"


def test_a_pod_that_fails_leaves_no_target_of_an_earlier_call(tmp_path: Path) -> None:
    """It would be taken for what the call that failed was to make."""
    run = make_run(tmp_path, POD)
    (run.targets / "given").mkdir()
    (run.targets / "given" / "rows").write_text("rows")
    run.call(run.as_pod("made"))
    run.call(run.as_pod("made", "--config", "fails=3"), ends_well=False)
    assert not (run.targets / "made").exists()


SLOW = """
if config.get("slow"):
    import time
    from harness.storage import in_place
    sync = in_place.sync
    in_place.sync = lambda place: (time.sleep(0.5), sync(place))
"""
"""Half a second for each file that is copied: a kill comes in the middle for certain."""


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Path]:
    with other_file_system(tmp_path) as folder:
        yield folder


def test_a_pod_that_is_killed_in_the_middle_of_the_store(tmp_path: Path, elsewhere: Path) -> None:
    """The target is not there; the next pod makes it, and one a day later removes what the first one left."""
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
    from harness.storage.stored_text import text_of
    for job in workflow.scheduler.failed:
        print([text_of(log) for log in job.log])
"""


def test_the_main_process_reads_the_log_of_a_failed_job(tmp_path: Path) -> None:
    run = make_run(tmp_path, POD + SAID)
    (run.targets / "given").mkdir()
    (run.targets / "given" / "rows").write_text("rows")
    assert "['said\\n']" in run.call(run.command("--config", "fails=3"), ends_well=False)


class Provider:
    """What FsObject asks of its provider."""

    def __init__(self, local_prefix: Path) -> None:
        self.local_prefix = local_prefix

    def safe_print(self, query: str) -> str:
        return query


def make_object(folder: Path, name: str) -> fs_object.FsObject:
    return fs_object.FsObject(str(folder / "targets" / name), False, True, Provider(folder / "local"))


def test_a_file_of_snakemakes_own_is_copied_and_stays(tmp_path: Path) -> None:
    archive = tmp_path / "sources.tar.xz"
    archive.write_text("sources")
    stored = make_object(tmp_path, "snakemake-workflow-sources.tar.xz")
    stored.set_local_path(archive)
    stored.store_object()
    assert stored.query_path.read_text() == archive.read_text() == "sources"
    stored.remove()
    assert archive.exists()
    assert not stored.query_path.exists()


def test_a_stale_local_copy_gives_way_to_the_link(tmp_path: Path) -> None:
    target = make_object(tmp_path, "folder")
    target.query_path.mkdir(parents=True)
    target.local_path().mkdir(parents=True)
    (target.local_path() / "old").write_text("old")
    for _ in range(2):
        target.retrieve_object()
        assert target.local_path().readlink() == target.query_path
    target.store_object()  # what is stored already stays as it is
    assert not target.query_path.is_symlink()
    target.remove()
    assert not os.path.lexists(target.local_path())


def test_a_look_finds_the_version_of_which_a_killed_writer_took_the_name(tmp_path: Path) -> None:
    """Where names cannot be exchanged, a folder loses its name for a moment before another one gets it."""
    target = make_object(tmp_path, "folder")
    (target.query_path.parent / f".folder.{time.time_ns():016x}-0123456789ab.old").mkdir(parents=True)
    assert target.exists()
    assert [place.name for place in target.query_path.parent.iterdir()] == ["folder"]
    target.remove()
    assert not target.exists()


def test_what_is_not_there_cannot_be_retrieved(tmp_path: Path) -> None:
    target = make_object(tmp_path, "nothing")
    with pytest.raises(FileNotFoundError):
        target.retrieve_object()
    assert not os.path.lexists(target.local_path())


def test_no_link_that_a_job_planted_leads_the_controller_elsewhere(tmp_path: Path) -> None:
    """Neither in the place of a folder on the way nor of the target itself."""
    state, archive = tmp_path / "state", tmp_path / "sources.tar.xz"
    for name in ("sources", "merged"):
        (state / name).mkdir(parents=True)
        (state / name / "kept").touch()
    archive.write_text("sources")
    (tmp_path / "targets").symlink_to("state")
    stored = make_object(tmp_path, "sources")
    stored.set_local_path(archive)
    for action in (stored.store_object, stored.remove, make_object(tmp_path, "merged").remove):
        with pytest.raises(VlmflowError, match=f"{tmp_path}/targets is a link"):
            action()
    (tmp_path / "targets").unlink()
    (tmp_path / "targets").mkdir()
    (tmp_path / "targets" / "merged").symlink_to(state / "merged")
    stored.store_object()
    make_object(tmp_path, "merged").remove()
    assert {place.name: place.read_text() for place in (tmp_path / "targets").iterdir()} == {"sources": "sources"}
    assert len(list(state.glob("*/kept"))) == 2


def test_what_goes_wrong_names_the_target_and_not_the_way_to_it(tmp_path: Path) -> None:
    target = tmp_path / "a" / "b"
    with pytest.raises(FileNotFoundError) as missing, no_links.reached(target, make=True) as place:
        place.read_text()
    assert missing.value.filename == str(target)


LOGS = {
    "link": lambda log, secret: log.symlink_to(secret),
    "folder": lambda log, secret: (log.parent.rmdir(), log.parent.symlink_to(secret.parent)),
    "pipe": lambda log, secret: os.mkfifo(log),
}


@pytest.mark.parametrize("planted", LOGS)
def test_a_log_is_read_by_no_link_and_from_no_pipe(tmp_path: Path, planted: str) -> None:
    """The controller would show its own token, or wait for ever."""
    log, secret = tmp_path / "targets" / "logs" / "token", tmp_path / "secrets" / "token"
    for place in (log, secret):
        place.parent.mkdir(parents=True)
    secret.write_text("secret")
    LOGS[planted](log, secret)
    with pytest.raises(VlmflowError, match="a job may have put it there"):
        text_of(SimpleNamespace(is_storage=True, storage_object=make_object(tmp_path, "logs/token")))


def test_a_log_is_shown_to_its_limit_and_without_control_characters(tmp_path: Path) -> None:
    log = make_object(tmp_path, "log")
    log.query_path.parent.mkdir()
    log.query_path.write_bytes(b"x" * 3_000_000 + b"\n\x1b]0;title\x07it \xe2\x80\xaefailed\n")
    text = text_of(SimpleNamespace(is_storage=True, storage_object=log))
    assert text.endswith("\n]0;titleit failed\n")
    assert len(text) < 1 << 20
