"""Targets in object storage, against a real S3 server."""

import json
import logging
import multiprocessing
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import snakemake_storage_plugin_s3

from cluster.binaries import binary
from harness.storage import manifest
from harness.storage.s3_object import S3Object
from storage_runs import StorageRun
from vlmflow.errors import VlmflowError


@dataclass(frozen=True)
class Server:
    """An S3 server of the tests, with its keys."""

    endpoint_url: str
    access_key: str
    secret_key: str

    @property
    def variables(self) -> dict[str, str]:
        """What the storage plugin reads from the environment."""
        return {f"SNAKEMAKE_STORAGE_S3_{name.upper()}": value for name, value in vars(self).items()} | {
            "no_proxy": "127.0.0.1"
        }

    def target(self, local: Path, name: str) -> S3Object:
        """Give a target in a bucket of its own; its local path is below `local`."""
        settings = snakemake_storage_plugin_s3.StorageProviderSettings(
            endpoint_url=self.endpoint_url, access_key=self.access_key, secret_key=self.secret_key
        )
        logger = logging.getLogger("test")
        provider = snakemake_storage_plugin_s3.StorageProvider(local_prefix=local, logger=logger, settings=settings)
        return S3Object(f"s3://{local.name.replace('_', '-')}/run/{name}", False, True, provider)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Give an S3 server on a free port of the loopback interface."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = Server(f"http://127.0.0.1:{port}", "vlmflow", secrets.token_hex(16))
    folder = tmp_path_factory.mktemp("s3")
    command = [binary("versitygw"), "--port", f"127.0.0.1:{port}", "--region", "us-east-1", "posix", folder]
    keys = {"ROOT_ACCESS_KEY": server.access_key, "ROOT_SECRET_KEY": server.secret_key}
    with (tmp_path_factory.mktemp("log") / "log").open("wb") as log:
        process = subprocess.Popen(command, env=os.environ | keys, stdout=log, stderr=log)
    deadline = time.monotonic() + 20
    while True:
        with socket.socket() as trial:
            if trial.connect_ex(("127.0.0.1", port)) == 0:
                break
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    yield server
    process.terminate()
    process.wait()


@pytest.fixture
def merged(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> S3Object:
    """Give a folder in storage, with three files."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    target = server.target(tmp_path, "merged/x")
    write(target, {"README.md": b"card", "inner/weights": b"w" * 100, "empty": b"", ".snakemake_timestamp": b""})
    target.store_object()
    return target


def write(target: S3Object, files: dict[str, bytes]) -> None:
    shutil.rmtree(target.local_path(), ignore_errors=True)
    for name, content in files.items():
        (target.local_path() / name).parent.mkdir(parents=True, exist_ok=True)
        (target.local_path() / name).write_bytes(content)


def read(target: S3Object) -> dict[str, bytes]:
    """Retrieve a folder anew, and give its files."""
    shutil.rmtree(target.local_path())
    target.retrieve_object()
    local = target.local_path()
    return {str(file.relative_to(local)): file.read_bytes() for file in local.rglob("*") if file.is_file()}


def keys(target: S3Object) -> set[str]:
    return {item.key.removeprefix("run/merged/x/") for item in target.s3bucket().objects.all()}


def test_a_folder_is_its_objects_and_a_manifest(merged: S3Object) -> None:
    assert keys(merged) == {"README.md", "inner/weights", "empty", manifest.NAME}
    assert (merged.exists(), merged.size(), merged.local_footprint()) == (True, 0, 104)
    assert abs(merged.mtime() - time.time()) < 60
    assert read(merged) == {"README.md": b"card", "inner/weights": b"w" * 100, "empty": b""}


def test_a_new_store_leaves_nothing_of_the_old_one(merged: S3Object) -> None:
    write(merged, {"README.md": b"other", "more": b"m"})
    merged.store_object()
    assert keys(merged) == {"README.md", "more", manifest.NAME}
    assert read(merged) == {"README.md": b"other", "more": b"m"}


def test_without_its_manifest_a_folder_is_not_there(merged: S3Object) -> None:
    merged.s3obj(manifest.NAME).delete()
    assert not merged.exists()
    with pytest.raises(FileNotFoundError):
        merged.retrieve_object()


def test_a_removed_folder_leaves_its_bucket(merged: S3Object) -> None:
    merged.remove()
    assert keys(merged) == set()
    assert not merged.exists()
    assert merged.bucket_exists()


def test_a_file_is_an_object(server: Server, merged: S3Object, tmp_path: Path) -> None:
    rows = server.target(tmp_path, "data/rows.jsonl")
    assert not rows.exists()
    rows.local_path().parent.mkdir(parents=True)
    rows.local_path().write_bytes(b"rows")
    rows.store_object()
    rows.local_path().unlink()
    rows.retrieve_object()
    assert rows.local_path().read_bytes() == b"rows"
    assert (rows.exists(), rows.size(), rows.local_footprint()) == (True, 4, 4)
    rows.remove()
    assert not rows.exists()


@pytest.mark.parametrize("damage", ["changed", "missing"])
def test_a_damaged_folder_is_refused_by_its_file(merged: S3Object, damage: str) -> None:
    if damage == "changed":
        merged.s3obj("inner/weights").put(Body=b"v" * 100)
    else:
        merged.s3obj("inner/weights").delete()
    shutil.rmtree(merged.local_path())
    with pytest.raises(VlmflowError, match="merged/x is damaged: inner/weights"):
        merged.retrieve_object()
    assert not merged.local_path().exists()


def test_a_manifest_that_leads_out_of_its_folder_is_refused(merged: S3Object) -> None:
    entry = {"size": 4, "etag": "x"}
    merged.s3obj(manifest.NAME).put(Body=json.dumps({"files": {"../../outside": entry}}).encode())
    with pytest.raises(VlmflowError, match="outside its folder"):
        merged.retrieve_object()


def test_a_kill_in_the_middle_of_a_store(server: Server, merged: S3Object, tmp_path: Path) -> None:
    """The folder is not there, though many of its objects are; the next store makes it whole."""
    files = {f"{number:02}": bytes([number]) * 2_000_000 for number in range(40)}
    write(merged, files)
    store = multiprocessing.get_context("fork").Process(
        target=lambda: server.target(tmp_path, "merged/x").store_object()
    )
    store.start()
    while len(keys(merged) & files.keys()) < 3:
        assert store.is_alive()
    store.kill()
    store.join()
    assert files.keys() - keys(merged)
    assert not merged.exists()
    merged.store_object()
    assert keys(merged) == {*files, manifest.NAME}
    assert read(merged) == files


ROAD = """
rule named:
    input: "work/x"
    output: directory("merged/x")
    log: "logs/named.log"
    shell: "mkdir {output}; cp {input}/* {output}; echo said > {log}"

rule made:
    output: temp(directory("work/x"))
    benchmark: "benchmarks/made.tsv"
    shell: "mkdir {output}; echo {config[word]} > {output}/rows"
"""


def test_snakemake_makes_targets_in_storage(server: Server, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    variables = tuple(server.variables.items())
    run = StorageRun(tmp_path / "work", "s3://a-road/run", tmp_path / "local", ROAD, "s3", variables)
    run.run("--config", "word=first")
    assert "Nothing to be done" in run.run("--config", "word=first")
    run.run("--config", "word=second", "--forcerun", "made", "--", "merged/x")
    bucket = server.target(tmp_path / "a-road", "merged/x").s3bucket()
    assert {item.key.removeprefix("run/") for item in bucket.objects.all()} == {
        "merged/x/rows",
        "merged/x/.manifest.json",
        "logs/named.log",
        "benchmarks/made.tsv",
    }
    assert bucket.Object("run/merged/x/rows").get()["Body"].read() == b"second\n"
    run.call(run.as_pod("made", "--config", "word=third"))
    assert bucket.Object("run/work/x/rows").get()["Body"].read() == b"third\n"
