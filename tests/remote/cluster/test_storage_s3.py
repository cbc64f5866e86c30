"""Targets in object storage, against a real S3 server."""

import logging
import multiprocessing
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import snakemake_storage_plugin_s3
from botocore.client import BaseClient

from cluster.binaries import binary
from interleavings import Process, content_of, explore, requests_in_turn
from storage_runs import SCRIPTS, StorageRun
from vlmflow.core.errors import VlmflowError
from vlmflow.remote.storage import s3_folder
from vlmflow.remote.storage.s3_object import S3Object


@dataclass(frozen=True)
class Server:
    """The tests' S3 server, with its keys; each folder in `folder` is a bucket."""

    endpoint_url: str
    access_key: str
    secret_key: str
    folder: Path

    @property
    def variables(self) -> dict[str, str]:
        """The storage plugin's environment variables."""
        names = ("endpoint_url", "access_key", "secret_key")
        own = {f"SNAKEMAKE_STORAGE_S3_{name.upper()}": getattr(self, name) for name in names}
        return own | {"no_proxy": "127.0.0.1"}

    def target(self, local: Path, name: str, bucket: str | None = None) -> S3Object:
        """Return a target in a bucket, by default its own; its local path is in `local`."""
        settings = snakemake_storage_plugin_s3.StorageProviderSettings(
            endpoint_url=self.endpoint_url, access_key=self.access_key, secret_key=self.secret_key
        )
        logger = logging.getLogger("test")
        provider = snakemake_storage_plugin_s3.StorageProvider(local_prefix=local, logger=logger, settings=settings)
        bucket = bucket or local.name.replace("_", "-")
        return S3Object(f"s3://{bucket}/run/{name}", False, True, provider)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Return an S3 server on a free loopback port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = tmp_path_factory.mktemp("s3")
    server = Server(f"http://127.0.0.1:{port}", "vlmflow", secrets.token_hex(16), folder)
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
    """Return a folder in storage, with three files."""
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
    """Retrieve a folder again, and return its files."""
    shutil.rmtree(target.local_path())
    target.retrieve_object()
    local = target.local_path()
    return {str(file.relative_to(local)): file.read_bytes() for file in local.rglob("*") if file.is_file()}


def keys(target: S3Object) -> set[str]:
    """Return the keys in the bucket; those of a folder's attempts without their tokens."""
    found = (item.key.removeprefix("run/") for item in target.s3bucket().objects.all())
    return {re.sub(r"/\.stored-[0-9a-f]{32}/", "//", key) for key in found}


def object_of(target: S3Object, name: str) -> Any:
    """Return the object that holds a file of a folder."""
    return target.s3bucket().Object(target._folder.entries()[name].key)


@pytest.fixture
def a_day_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count objects without a manifest as a killed writer's at once."""
    monkeypatch.setattr(s3_folder, "LEFT_AFTER", timedelta(seconds=-2))


FILES = {"merged/x//files/README.md", "merged/x//files/inner/weights", "merged/x//files/empty"}
MANIFEST = f"merged/x/{s3_folder.NAME}"


def test_a_folder_is_its_objects_and_a_manifest(merged: S3Object) -> None:
    assert keys(merged) == {*FILES, MANIFEST}
    assert (merged.exists(), merged.size(), merged.local_footprint()) == (True, 0, 104)
    assert abs(merged.mtime() - time.time()) < 60
    assert read(merged) == {"README.md": b"card", "inner/weights": b"w" * 100, "empty": b""}


def test_a_new_store_leaves_the_old_objects_for_a_day(merged: S3Object, monkeypatch: pytest.MonkeyPatch) -> None:
    write(merged, {"README.md": b"other", "more": b"m"})
    merged.store_object()
    assert keys(merged) == {*FILES, "merged/x//files/more", MANIFEST}
    assert read(merged) == {"README.md": b"other", "more": b"m"}
    monkeypatch.setattr(s3_folder, "LEFT_AFTER", timedelta(seconds=-2))
    merged.store_object()
    assert keys(merged) == {"merged/x//files/README.md", "merged/x//files/more", MANIFEST}
    assert read(merged) == {"README.md": b"other", "more": b"m"}


def test_without_its_manifest_a_folder_is_not_there(merged: S3Object) -> None:
    merged.s3obj(s3_folder.NAME).delete()
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
    kept = rows.s3obj()
    kept.put(Body=b"cows", Metadata=kept.metadata)
    with pytest.raises(VlmflowError, match=r"data/rows\.jsonl is damaged: its sha256"):
        rows.retrieve_object()
    assert not rows.local_path().exists()
    kept.put(Body=b"rows")  # as somebody else stores it
    rows.retrieve_object()
    assert (rows.exists(), rows.size(), rows.local_footprint()) == (True, 4, 4)
    rows.remove()
    assert not rows.exists()


@pytest.mark.parametrize("damage", ["changed", "missing"])
def test_a_damaged_folder_is_refused_by_its_file(merged: S3Object, damage: str) -> None:
    if damage == "changed":
        object_of(merged, "inner/weights").put(Body=b"v" * 100)
    else:
        object_of(merged, "inner/weights").delete()
    shutil.rmtree(merged.local_path())
    with pytest.raises(VlmflowError, match="merged/x is damaged: inner/weights"):
        merged.retrieve_object()
    assert not merged.local_path().exists()


def test_a_manifest_that_leads_out_of_its_folder_is_refused(merged: S3Object) -> None:
    entry = merged._folder.entries()["empty"]
    merged.s3obj(s3_folder.NAME).put(Body=s3_folder.dump({"../../outside": entry}))
    with pytest.raises(VlmflowError, match="outside its folder"):
        merged.retrieve_object()


def test_a_kill_in_the_middle_of_a_store(server: Server, merged: S3Object, tmp_path: Path) -> None:
    """The previous target stays complete; the killed writer's objects are removed after a day."""
    was = read(merged)
    files = {f"{number:02}": bytes([number]) * 2_000_000 for number in range(40)}
    write(merged, files)
    store = multiprocessing.get_context("fork").Process(
        target=lambda: server.target(tmp_path, "merged/x").store_object()
    )
    store.start()
    while len(keys(merged) - FILES) < 3:
        assert store.is_alive()
    store.kill()
    store.join()
    sent = {key.removeprefix("merged/x//files/") for key in keys(merged)}
    assert files.keys() - sent
    assert read(merged) == was


def test_a_killed_download_is_resumed(
    server: Server, merged: S3Object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`vlmflow cluster get … --from s3://…`."""
    files = {f"{number}.safetensors": os.urandom(40_000_000) for number in range(4)}
    write(merged, files)
    merged.store_object()
    for name, value in server.variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", str(SCRIPTS))
    bucket, to = f"s3://{tmp_path.name.replace('_', '-')}", tmp_path / "to"
    command = [sys.executable, "-m", "vlmflow.command", "cluster", "get", "run/merged/x", to, "--from", bucket]
    first, second = (tmp_path / "to.part" / f"{number}.safetensors" for number in (0, 1))
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        while not second.exists():
            assert process.poll() is None
        process.kill()
    assert not to.exists()
    kept = first.stat()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "every file has the digest of the original" in done.stderr
    assert {file.name: file.read_bytes() for file in to.iterdir()} == files
    now = (to / first.name).stat()
    assert (now.st_ino, now.st_mtime_ns) == (kept.st_ino, kept.st_mtime_ns)
    object_of(merged, "3.safetensors").put(Body=os.urandom(40_000_000))
    shutil.rmtree(to)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "merged/x is damaged: 3.safetensors: sha256" in done.stderr
    assert not to.exists()


VERIFIED = {"weights": b"w" * 100, "proof.json": b"{}"}
MERGED = {"weights": VERIFIED["weights"], "README.md": b"card"}


@pytest.fixture
def published(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[S3Object, S3Object]:
    """Return verified/x, and merged/x made from this process's copy of it."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    verified, merged = server.target(tmp_path, "verified/x"), server.target(tmp_path, "merged/x")
    write(verified, VERIFIED)
    verified.store_object()
    shutil.rmtree(verified.local_path())
    verified.retrieve_object()
    merged.local_path().mkdir(parents=True)
    os.link(verified.local_path() / "weights", merged.local_path() / "weights")
    (merged.local_path() / "README.md").write_text("card")
    merged.store_object()
    return verified, merged


def test_the_storage_copies_proven_files_to_the_published_folder(
    published: tuple[S3Object, S3Object], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, merged = published
    assert keys(merged) == {
        *("verified/x//files/weights", "verified/x//files/proof.json", f"verified/x/{s3_folder.NAME}"),
        *("merged/x//files/weights", "merged/x//files/README.md", MANIFEST),
    }
    assert read(merged) == MERGED
    asked, real = [], BaseClient._make_api_call

    def call(client: BaseClient, operation: str, named: dict[str, Any]) -> Any:
        asked.append((operation, named.get("Key", "")))
        return real(client, operation, named)

    monkeypatch.setattr(BaseClient, "_make_api_call", call)
    merged.store_object()
    assert {operation for operation, key in asked if "/files/" in key} == {"HeadObject", "CopyObject"}
    assert read(merged) == MERGED


@pytest.mark.usefixtures("a_day_later")
@pytest.mark.parametrize("first", [0, 1])
def test_each_folder_goes_alone(published: tuple[S3Object, S3Object], first: int) -> None:
    one, other = published[first], published[1 - first]
    held = read(other)
    one.remove()
    assert not one.exists()
    assert read(other) == held
    other.remove()
    assert keys(other) == set()


@dataclass
class EveryOrder:
    """Every order of the requests of several processes to a bucket with its present content."""

    server: Server
    tmp_path: Path
    patch: pytest.MonkeyPatch
    bucket: str

    def target(self, place: str, name: str, bucket: str | None = None) -> S3Object:
        """Return a target of the bucket for a separate process, whose local path is in `place`."""
        return self.server.target(self.tmp_path / "places" / place, name, bucket or self.bucket)

    def explore(self, make: Callable[[], list[Process]], wholes: list[dict], before: Any) -> list[Any]:
        """Return the outcomes. merged/x is at every moment one of `wholes`, or what it was `before` the first success.

        And a later writer can make it, and leaves nothing of the killed ones.
        """
        folder, saved = self.server.folder / self.bucket, self.tmp_path / "saved"
        checked: set[str] = set()
        known = dict(s3_folder._retrieved)  # only the processes' files, not those of the check
        shutil.copytree(folder, saved)

        def prepare() -> list[Process]:
            shutil.copytree(saved, folder, dirs_exist_ok=True)
            return make()

        def check(processes: list[Process]) -> None:
            succeeded = any(process.outcome == "ok" for process in processes[: len(wholes)])
            state = repr((content_of(folder), succeeded))
            if state in checked:
                return
            checked.add(state)
            found = self.target("reader", "merged/x")
            found.local_path().mkdir(parents=True, exist_ok=True)
            content = read(found) if found.exists() else None
            s3_folder._retrieved.clear()
            s3_folder._retrieved.update(known)
            assert content in [*wholes, *([] if succeeded else [before])]
            shutil.rmtree(self.server.folder / "copy", ignore_errors=True)
            shutil.copytree(folder, self.server.folder / "copy")
            with self.patch.context() as later:
                later.setattr(s3_folder, "LEFT_AFTER", timedelta(seconds=-2))
                next_writer = self.target("later", "merged/x", "copy")
                write(next_writer, {"1": b"later"})
                next_writer.store_object()
                assert {key for key in keys(next_writer) if key.startswith("merged")} == {"merged/x//files/1", MANIFEST}

        with requests_in_turn(self.patch):
            states, ends = explore(folder, prepare, check)
        print(f"{states} states, {len(ends)} ends")
        return ends


@pytest.fixture
def every_order(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EveryOrder:
    return EveryOrder(server, tmp_path, monkeypatch, tmp_path.name.replace("_", "-"))


@pytest.mark.slow  # test_storage_interleavings.py has them without a server
def test_two_writers_of_one_folder(merged: S3Object, every_order: EveryOrder) -> None:
    """Files of equal names and sizes: in every order, and after every kill, all files are of one writer."""
    versions = {letter: {name: letter.encode() * 8 for name in ("1", "2")} for letter in "ab"}

    def make() -> list[Process]:
        targets = {letter: every_order.target(letter, "merged/x") for letter in "ab"}
        for letter, target in targets.items():
            write(target, versions[letter])
        return [Process(letter, target.store_object) for letter, target in targets.items()]

    ends = every_order.explore(make, list(versions.values()), read(merged))
    assert all(end == ["ok", "ok"] for end in ends)


@pytest.mark.slow
def test_a_proven_folder_that_goes_while_it_is_published(
    published: tuple[S3Object, S3Object], every_order: EveryOrder
) -> None:
    """In every order the published folder is complete, whether it names the proven objects or was uploaded."""
    published[1].remove()

    def make() -> list[Process]:
        merged, verified = every_order.target("a", "merged/x"), every_order.target("b", "verified/x")
        write(merged, MERGED)
        return [Process("a", merged.store_object), Process("b", verified.remove)]

    ends = every_order.explore(make, [MERGED], None)
    assert all(end == ["ok", "ok"] for end in ends)


def test_a_bucket_is_not_created_if_its_existence_is_unknown(server: Server, tmp_path: Path) -> None:
    strange = replace(server, secret_key="wrong")  # noqa: S106
    stranger = strange.target(tmp_path, "data/rows.jsonl")
    stranger.local_path().parent.mkdir(parents=True)
    stranger.local_path().write_text("rows")
    with pytest.raises(VlmflowError, match=r"cannot find out whether it exists.*403"):
        stranger.store_object()
    own = server.target(tmp_path, "data/rows.jsonl")
    assert not own.bucket_exists()


WORKFLOW = """
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
    run = StorageRun(tmp_path / "work", "s3://a-workflow/run", tmp_path / "local", WORKFLOW, "s3", variables)
    run.run("--config", "word=first")
    assert "Nothing to be done" in run.run("--config", "word=first")
    run.run("--config", "word=second", "--forcerun", "made", "--", "merged/x")
    target, temporary = (server.target(tmp_path / "a-workflow", name) for name in ("merged/x", "work/x"))
    assert keys(target) == {
        "merged/x//files/rows",
        "merged/x/.manifest.json",
        "logs/named.log",
        "benchmarks/made.tsv",
    }
    assert object_of(target, "rows").get()["Body"].read() == b"second\n"
    run.call(run.as_pod("made", "--config", "word=third"))
    assert object_of(temporary, "rows").get()["Body"].read() == b"third\n"
