"""Files that the storage copies by itself, and those that it cannot copy or must not: these are uploaded."""

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import boto3
import pytest
from botocore.config import Config

from bucket_server import BucketServer, error
from faulty_server import breaks
from vlmflow.remote.storage.s3_folder import Folder

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
