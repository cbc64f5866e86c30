"""Folders in S3: their manifest, and the files that the storage copies by itself or that are uploaded."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import boto3
import pytest
from botocore.config import Config

from bucket_server import BucketServer, error
from faulty_server import breaks
from vlmflow.core.errors import VlmflowError
from vlmflow.remote.storage import pod_folder, s3_folder
from vlmflow.remote.storage.s3_folder import Entry, Folder

PLACE, FOLDER = "s3://bucket/run/merged/x/.manifest.json", "run/merged/x"
KEY = f"{FOLDER}/.stored-{'0' * 32}/files/"
DIGEST = "ab" * 32


def entry(name: str, size: int = 1, key: str | None = None) -> Entry:
    return Entry(size, DIGEST, key or KEY + name)


def test_a_manifest_is_read_as_it_was_written() -> None:
    elsewhere = f"run/verified/x/.stored-{'1' * 32}/files/weights\n"
    entries = {"b/é.txt": entry("b/é.txt", 0), "a": entry("a", 1 << 40), "w": entry("w", key=elsewhere)}
    assert s3_folder.load(s3_folder.dump(entries), PLACE) == entries
    assert s3_folder.dump(entries) == s3_folder.dump(dict(reversed(entries.items())))
    assert s3_folder.attempts_of(entries) == {f"{FOLDER}/.stored-{'0' * 32}", f"run/verified/x/.stored-{'1' * 32}"}


GOOD = {"size": 1, "sha256": DIGEST, "key": KEY + "a"}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[" * 200_000,
        b"[]",
        b'{"version": 1, "files": [1]}',
        b'{"version": 1, "files": {"a": {}}}',
        json.dumps({"files": {"a": GOOD}}).encode(),
        json.dumps({"version": 2, "files": {"a": GOOD}}).encode(),
        *(
            json.dumps({"version": 1, "files": {"a": GOOD | wrong}}).encode()
            for wrong in ({"size": -1}, {"sha256": "ab"}, {"sha256": None}, {"key": "run/elsewhere"}, {"key": 1})
        ),
    ],
)
def test_a_file_that_is_not_a_manifest_is_refused_with_its_address(content: bytes) -> None:
    with pytest.raises(VlmflowError, match=f"{PLACE} is not a manifest"):
        s3_folder.load(content, PLACE)


def test_a_manifest_that_nobody_could_read_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job wrote it; the main process reads it."""
    monkeypatch.setattr(s3_folder, "LARGEST", 1_000)
    entries = {f"file-{number}": entry(f"file-{number}") for number in range(10)}
    with pytest.raises(VlmflowError, match="larger than 0 MB"):
        s3_folder.dump(entries)
    with pytest.raises(VlmflowError, match="larger than 0 MB"):
        s3_folder.load(b"{" + b" " * 1_000, PLACE)


@pytest.mark.parametrize("name", ["../a", "/etc/passwd", "a/../../b", "", ".", "a//b", "./a"])
def test_a_name_that_leads_out_of_the_folder_is_refused(name: str) -> None:
    with pytest.raises(VlmflowError, match="outside its folder"):
        s3_folder.load(s3_folder.dump({name: entry("a")}), PLACE)


def test_the_folder_of_a_lost_pod_is_removed_and_no_other(tmp_path: Path) -> None:
    for name in ("lost-pod-x1", "other"):
        (tmp_path / ".pods" / name / "fs").mkdir(parents=True)
    prefix = tmp_path / ".pods" / "$VLMFLOW_POD"
    pod_folder.remove_of(prefix, "lost-pod-x1")
    pod_folder.remove_of(prefix, "never-began")
    pod_folder.remove_of(tmp_path / ".pods", "other")  # a folder that several pods share belongs to none
    assert [place.name for place in (tmp_path / ".pods").iterdir()] == ["other"]


def test_a_link_in_the_place_of_the_pods_folders_removes_nothing_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "state" / "lost-pod-x1").mkdir(parents=True)
    (tmp_path / ".pods").symlink_to("state")
    pod_folder.remove_of(tmp_path / ".pods" / "$VLMFLOW_POD", "lost-pod-x1")
    (tmp_path / ".pods").unlink()
    (tmp_path / ".pods").mkdir()
    (tmp_path / ".pods" / "lost-pod-x1").symlink_to(tmp_path / "state")
    pod_folder.remove_of(tmp_path / ".pods" / "$VLMFLOW_POD", "lost-pod-x1")
    assert (tmp_path / "state" / "lost-pod-x1").is_dir()


@pytest.mark.parametrize("name", ["", ".", "..", "../run", "a/b", "a..b", "-a", "$VLMFLOW_POD", "a\n"])
def test_a_name_that_is_not_a_pods_removes_nothing(tmp_path: Path, name: str) -> None:
    (tmp_path / ".pods" / "other").mkdir(parents=True)
    with pytest.raises(VlmflowError, match="not a pod's name"):
        pod_folder.remove_of(tmp_path / ".pods" / "$VLMFLOW_POD", name)
    assert (tmp_path / ".pods" / "other").is_dir()


def test_a_starting_controller_removes_folders_of_ended_pods(tmp_path: Path) -> None:
    cut_off = [f".discarded.{since:016x}-{'0' * 12}.gone" for since in (0, time.time_ns())]  # the second may still run
    for name in ("lost-pod-x1", "living-x2", "late-x3", "No-pods", ".hidden", *cut_off):
        (tmp_path / ".pods" / name / "fs").mkdir(parents=True)
    prefix = tmp_path / ".pods" / "$VLMFLOW_POD"
    said: list[str] = []
    pod_folder.sweep(prefix, lambda: {"living-x2", "late-x3"}, said.append)
    assert said == ["Removed the folders of 1 pod that ended while no controller was running: lost-pod-x1."]
    stay = {"living-x2", "late-x3", "No-pods", ".hidden", cut_off[1]}
    assert {place.name for place in (tmp_path / ".pods").iterdir()} == stay


def test_a_sweep_without_such_a_folder_asks_nobody_and_removes_nothing(tmp_path: Path) -> None:
    (tmp_path / ".pods" / "a").mkdir(parents=True)
    for prefix in (Path(".snakemake/storage"), tmp_path / "none" / "$VLMFLOW_POD", tmp_path / ".pods"):
        pod_folder.sweep(prefix, lambda: pytest.fail("asked"), pytest.fail)
    (tmp_path / "link").symlink_to(".pods")
    pod_folder.sweep(tmp_path / "link" / "$VLMFLOW_POD", lambda: pytest.fail("asked"), pytest.fail)
    assert (tmp_path / ".pods" / "a").is_dir()


FILES = {"in parts": Random(1).randbytes(9_000_000), "whole é": b"w" * 1000}
"""boto3 copies and uploads what has 8 MiB or more in parts."""

SESSION = boto3.Session()
"""It reads the descriptions of S3's requests once."""


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[BucketServer]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with BucketServer() as server:
        server.store("run/verified/x", FILES)
        yield server


@pytest.fixture
def client(bucket: BucketServer) -> Any:
    """Return boto3's object of the bucket, which waits a second for an answer and asks once."""
    return SESSION.resource(
        "s3",
        endpoint_url=f"http://127.0.0.1:{bucket.port}",
        aws_access_key_id="a",
        aws_secret_access_key="s" * 8,
        region_name="us-east-1",
        config=Config(read_timeout=1, retries={"total_max_attempts": 1}),
    ).Bucket("bucket")


def test_a_file_of_a_folder_is_read_alone(client: Any) -> None:
    folder = Folder(client, "run/verified/x")
    assert folder.content("whole é", 99) == b"w" * 99
    assert folder.content("another", 99) is None
    assert Folder(client, "run/verified/y").content("whole é", 99) is None


def stored_again(client: Any, folder: Path) -> dict[str, bytes]:
    """Store in another folder what was downloaded, and return what that has."""
    Folder(client, "run/merged/x").store(folder / "local")
    Folder(client, "run/merged/x").retrieve(folder / "again")
    return {file.name: file.read_bytes() for file in (folder / "again").iterdir()}


def test_what_was_downloaded_and_not_changed_is_copied(bucket: BucketServer, client: Any, tmp_path: Path) -> None:
    Folder(client, "run/verified/x").retrieve(tmp_path / "local")
    assert stored_again(client, tmp_path) == FILES
    assert {key.rpartition("/")[2] for key in bucket.copied} == set(FILES)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    "fault",
    [
        lambda answer: error(400, "InvalidRequest"),
        lambda answer: error(412, "PreconditionFailed"),
        lambda answer: error(500, "InternalError"),
        breaks(0, "stall"),
        breaks(0),
    ],
    ids=["refused", "changed meanwhile", "failed", "silent", "broken off"],
)
def test_what_cannot_be_copied_is_uploaded(
    bucket: BucketServer, client: Any, tmp_path: Path, name: str, fault: Any
) -> None:
    Folder(client, "run/verified/x").retrieve(tmp_path / "local")
    bucket.faults[name] = [fault]
    assert stored_again(client, tmp_path) == FILES
    assert bucket.faults[name] == []


def test_a_server_that_ignores_the_source_of_a_copy_gets_uploads(
    bucket: BucketServer, client: Any, tmp_path: Path
) -> None:
    Folder(client, "run/verified/x").retrieve(tmp_path / "local")
    bucket.copies = False
    assert stored_again(client, tmp_path) == FILES


@pytest.mark.parametrize("name", FILES)
def test_a_source_that_changed_since_its_download_is_not_copied(
    bucket: BucketServer, client: Any, tmp_path: Path, name: str
) -> None:
    Folder(client, "run/verified/x").retrieve(tmp_path / "local")
    bucket.objects[f"run/verified/x/.stored-{'0' * 32}/files/{name}"] = b"v" * len(FILES[name])
    assert stored_again(client, tmp_path) == FILES
