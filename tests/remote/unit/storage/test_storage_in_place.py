"""Stored targets in a folder of the network: what is put in place, and what a job may have put there."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from storage_runs import SCRIPTS, other_file_system
from vlmflow.core.errors import VlmflowError
from vlmflow.remote.storage import in_place, plugins, pod_folder
from vlmflow.remote.storage.plugins import text_of


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Path]:
    with other_file_system(tmp_path) as folder:
        yield folder


def make_folder(folder: Path, content: str, files: int = 3) -> Path:
    for number in range(files):
        (folder / "inner").mkdir(parents=True, exist_ok=True)
        (folder / "inner" / f"{number}.txt").write_text(f"{content} {number}")
    return folder


def names_in(folder: Path) -> set[str]:
    return {place.name for place in folder.iterdir()}


def test_a_file_is_renamed_and_keeps_its_inode_and_time(tmp_path: Path) -> None:
    source, target = tmp_path / "local" / "rows.jsonl", tmp_path / "targets" / "data" / "rows.jsonl"
    source.parent.mkdir()
    source.write_text("rows")
    os.utime(source, (1, 1_000_000))
    before = source.stat()
    in_place.move(source, target)
    assert (target.stat().st_ino, target.stat().st_mtime) == (before.st_ino, 1_000_000)
    assert not source.exists()
    assert names_in(target.parent) == {"rows.jsonl"}


@pytest.mark.parametrize("source_is_elsewhere", [False, True])
def test_a_folder_replaces_an_older_one(tmp_path: Path, elsewhere: Path, source_is_elsewhere: bool) -> None:
    source = make_folder((elsewhere if source_is_elsewhere else tmp_path) / "source", "new", files=2)
    (source / "inner" / "link").symlink_to("0.txt")
    os.utime(source / "inner" / "1.txt", (1, 2_000_000))
    target = make_folder(tmp_path / "targets" / "target", "old", files=5)
    in_place.move(source, target)
    assert names_in(target / "inner") == {"0.txt", "1.txt", "link"}
    assert (target / "inner" / "1.txt").read_text() == "new 1"
    assert (target / "inner" / "1.txt").stat().st_mtime == 2_000_000
    assert (target / "inner" / "link").readlink() == Path("0.txt")
    assert not source.exists()
    assert names_in(target.parent) == {"target"}


def test_a_folder_replaces_a_file_and_a_file_replaces_a_folder(tmp_path: Path) -> None:
    target = tmp_path / "targets" / "name"
    for content in ("file", "folder", "file again"):
        source = tmp_path / "source"
        if content == "folder":
            make_folder(source, content)
        else:
            source.write_text(content)
        in_place.move(source, target)
        assert target.is_dir() == (content == "folder")
        assert names_in(target.parent) == {"name"}


def test_targets_of_links_out_of_the_folder_are_included(tmp_path: Path) -> None:
    outside = make_folder(tmp_path / "outside", "kept")
    source = make_folder(tmp_path / "source", "new")
    (source / "file").symlink_to(outside / "inner" / "1.txt")
    (source / "folder").symlink_to("../outside")
    (source / "own").symlink_to((source / "inner" / "2.txt").absolute())
    in_place.move(source, tmp_path / "target")
    shutil.rmtree(outside)
    assert (tmp_path / "target" / "file").read_text() == "kept 1"
    assert (tmp_path / "target" / "folder" / "inner" / "0.txt").read_text() == "kept 0"
    assert (tmp_path / "target" / "own").read_text() == "new 2"


def test_a_target_that_is_a_link_is_replaced_and_what_it_led_to_stays(tmp_path: Path) -> None:
    held, source, target = make_folder(tmp_path / "held", "held"), tmp_path / "source", tmp_path / "target"
    target.symlink_to(held)
    in_place.move(make_folder(source, "new"), target)
    assert not target.is_symlink()
    assert (held / "inner" / "0.txt").read_text() == "held 0"
    target.rename(tmp_path / "moved")
    target.symlink_to(held)
    in_place.take_away(target)
    assert not target.is_symlink()
    assert held.is_dir()


def test_a_folder_of_any_depth_is_deleted(tmp_path: Path) -> None:
    """A job can make one too deep for any path, and the controller must remove it."""
    there = os.open(tmp_path, os.O_RDONLY)
    for _ in range(700):
        os.mkdir("deeper", dir_fd=there)
        inner = os.open("deeper", os.O_RDONLY, dir_fd=there)
        os.close(there)
        there = inner
    os.close(there)
    assert in_place.discard(tmp_path / "deeper")
    assert list(tmp_path.iterdir()) == []


def test_a_link_to_nothing_is_refused_and_the_target_stays(tmp_path: Path) -> None:
    source, target = make_folder(tmp_path / "source", "new"), make_folder(tmp_path / "target", "old")
    (source / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError):
        in_place.move(source, target)
    assert (target / "inner" / "0.txt").read_text() == "old 0"


WRITE = """
import sys, time
from pathlib import Path
from vlmflow.remote.storage import in_place
sync = in_place.sync
in_place.sync = lambda place: (time.sleep(float(sys.argv[3]) if ".part" in str(place) else 0), sync(place))
print(flush=True)
in_place.move(Path(sys.argv[1]), Path(sys.argv[2]))
"""


@pytest.mark.parametrize("moment", [None, 0.0, 0.02, 0.1])
def test_after_a_kill_the_target_is_complete_or_absent(tmp_path: Path, elsewhere: Path, moment: float | None) -> None:
    """From another file system, so that the kill is in the middle of a copy: 30 MB in 30 files."""
    source, target = elsewhere / "source", make_folder(tmp_path / "targets" / "merged", "old", files=30)
    source.mkdir()
    for number in range(30):
        (source / str(number)).write_bytes(b"w" * 1_000_000)
    pause = "1" if moment == 0.0 else "0"  # after each file, so that the kill is certainly in the middle
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITE, source, target, pause], stdout=subprocess.PIPE, env={"PYTHONPATH": str(SCRIPTS)}
    )
    writer.stdout.readline()
    if moment is not None:
        while not list(target.parent.glob(".merged.*.part")) and writer.poll() is None:
            time.sleep(0.0005)
        time.sleep(moment)
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    if moment == 0.0:
        (part,) = target.parent.glob(".merged.*.part")
        assert len(list(part.iterdir())) < 30
    files = [place for place in target.rglob("*") if place.is_file()] if target.exists() else []
    assert len(files) in (0, 30)
    assert len({place.stat().st_size for place in files if place.suffix == ""} - {1_000_000}) == 0
    if source.exists() and len(list(source.iterdir())) == 30:  # as the next pod does
        in_place.move(source, target)
        assert {name for name in names_in(target.parent) if not name.endswith(".part")} == {"merged"}
        assert sum(place.stat().st_size for place in target.iterdir()) == 30_000_000


class Provider:
    """What FsObject needs from its provider."""

    def __init__(self, local_prefix: Path) -> None:
        self.local_prefix = local_prefix

    def safe_print(self, query: str) -> str:
        return query


def make_object(folder: Path, name: str) -> plugins.FsObject:
    return plugins.FsObject(str(folder / "targets" / name), False, True, Provider(folder / "local"))


def test_snakemakes_own_file_is_copied_and_stays(tmp_path: Path) -> None:
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
    target.store_object()  # what is already stored remains unchanged
    assert not target.query_path.is_symlink()
    target.remove()
    assert not os.path.lexists(target.local_path())


def test_a_reader_restores_the_version_that_a_killed_writer_renamed(tmp_path: Path) -> None:
    """If names cannot be exchanged, a folder loses its name for a moment before another one gets it."""
    target = make_object(tmp_path, "folder")
    (target.query_path.parent / f".folder.{time.time_ns():016x}-0123456789ab.old").mkdir(parents=True)
    assert target.exists()
    assert [place.name for place in target.query_path.parent.iterdir()] == ["folder"]
    target.remove()
    assert not target.exists()


def test_a_missing_target_cannot_be_retrieved(tmp_path: Path) -> None:
    target = make_object(tmp_path, "nothing")
    with pytest.raises(FileNotFoundError):
        target.retrieve_object()
    assert not os.path.lexists(target.local_path())


def test_no_link_that_a_job_planted_leads_the_controller_elsewhere(tmp_path: Path) -> None:
    """Neither in place of a folder on the way nor of the target itself."""
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


def test_an_error_names_the_target_and_not_its_path(tmp_path: Path) -> None:
    target = tmp_path / "a" / "b"
    with pytest.raises(FileNotFoundError) as missing, pod_folder.reached(target, make=True) as place:
        place.read_text()
    assert missing.value.filename == str(target)


LOGS = {
    "link": lambda log, secret: log.symlink_to(secret),
    "folder": lambda log, secret: (log.parent.rmdir(), log.parent.symlink_to(secret.parent)),
    "pipe": lambda log, secret: os.mkfifo(log),
}


@pytest.mark.parametrize("planted", LOGS)
def test_a_log_is_read_by_no_link_and_from_no_pipe(tmp_path: Path, planted: str) -> None:
    """The controller would show its own token, or wait forever."""
    log, secret = tmp_path / "targets" / "logs" / "token", tmp_path / "secrets" / "token"
    for place in (log, secret):
        place.parent.mkdir(parents=True)
    secret.write_text("secret")
    LOGS[planted](log, secret)
    with pytest.raises(VlmflowError, match="a job may have made it"):
        text_of(SimpleNamespace(is_storage=True, storage_object=make_object(tmp_path, "logs/token")))


def test_a_log_is_shown_to_its_limit_and_without_control_characters(tmp_path: Path) -> None:
    log = make_object(tmp_path, "log")
    log.query_path.parent.mkdir()
    log.query_path.write_bytes(b"x" * 3_000_000 + b"\n\x1b]0;title\x07it \xe2\x80\xaefailed\n")
    text = text_of(SimpleNamespace(is_storage=True, storage_object=log))
    assert text.endswith("\n]0;titleit failed\n")
    assert len(text) < 1 << 20
