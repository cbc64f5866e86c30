"""A stored target, and what a job may have put in its place."""

import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from vlmflow.core.errors import VlmflowError
from vlmflow.remote.storage import plugins, pod_folder
from vlmflow.remote.storage.plugins import text_of


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
