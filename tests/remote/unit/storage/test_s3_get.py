"""Downloads of targets in S3 over connections that break, from a bucket whose objects change."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from bucket_server import BucketServer
from faulty_server import Answer, breaks, ignores_range, refuses
from vlmflow.core import patience
from vlmflow.core.errors import PassingError, VlmflowError
from vlmflow.remote.storage import s3_get
from vlmflow.remote.storage.s3_get import main
from workflow_runs import ROOT

PIECE = 1 << 16
FILES = {
    "model-00001-of-00002.safetensors": Random(1).randbytes(5 * PIECE + 123),
    "model-00002-of-00002.safetensors": Random(2).randbytes(2 * PIECE),
    "inner/rows é.jsonl": b"{}\n" * 1000,
    "empty": b"",
}
FIRST = "model-00001-of-00002.safetensors"
ADDRESS = "s3://bucket/run/merged/x"


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[BucketServer]:
    """Return a bucket with the folder run/merged/x; small pieces, and no pauses before further attempts."""
    monkeypatch.setattr(s3_get, "PIECE", PIECE)
    monkeypatch.setattr(patience, "FIRST_WAIT", 0.0)
    with BucketServer() as server:
        for name, value in server.variables.items():
            monkeypatch.setenv(name, value)
        server.store("run/merged/x", FILES)
        yield server


def key_of(name: str, attempt: str = "0") -> str:
    return f"run/merged/x/.stored-{attempt * 32}/files/{name}"


def content_of(folder: Path) -> dict[str, bytes]:
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_a_folder_arrives_complete(bucket: BucketServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(ADDRESS, tmp_path / "here" / "x")
    assert content_of(tmp_path / "here" / "x") == FILES
    assert [place.name for place in (tmp_path / "here").iterdir()] == ["x"]
    assert bucket.sent[key_of(FIRST)] == len(FILES[FIRST])
    assert "get run/merged/x: 0.5 of 0.5 MB" in capsys.readouterr().err
    with pytest.raises(VlmflowError, match="x already exists"):
        main(ADDRESS, tmp_path / "here" / "x")


@pytest.mark.parametrize("end", ["close", "reset"])
def test_a_connection_that_breaks_is_resumed(bucket: BucketServer, tmp_path: Path, end: str) -> None:
    bucket.faults[FIRST] = [breaks(1000, end), breaks(PIECE - 1, end), refuses(503), breaks(0, end)]
    main(ADDRESS, tmp_path / "x")
    assert content_of(tmp_path / "x") == FILES
    if end == "close":  # a reset also discards the bytes in transfer
        assert bucket.sent[key_of(FIRST)] == len(FILES[FIRST]) + len(refuses(503)(Answer(0, {})).body)


def test_a_server_that_stays_away_leaves_what_is_here(bucket: BucketServer, tmp_path: Path) -> None:
    """The folder does not have its name, and the next call asks for nothing twice."""
    bucket.faults["model-00002-of-00002.safetensors"] = [refuses(503)] * 100
    with pytest.raises(PassingError, match=r"model-00002-of-00002\.safetensors: S3 answers .*, 8 times in a row"):
        main(ADDRESS, tmp_path / "x")
    assert not (tmp_path / "x").exists()
    assert (tmp_path / "x.part" / FIRST).read_bytes() == FILES[FIRST]
    bucket.faults.clear()
    bucket.ranges.clear()
    main(ADDRESS, tmp_path / "x")
    assert content_of(tmp_path / "x") == FILES
    assert key_of(FIRST) not in bucket.ranges
    assert not (tmp_path / "x.part").exists()


SLOWLY = """
import sys
from pathlib import Path
from vlmflow.remote.storage import s3_get
s3_get.PIECE, s3_get.STREAMS = 1 << 16, 1
s3_get.main(sys.argv[1], Path(sys.argv[2]))
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_download_resumes_where_its_bytes_end(
    bucket: BucketServer, tmp_path: Path, number: signal.Signals
) -> None:
    bucket.pace = 0.2
    environment = os.environ | {"PYTHONPATH": str(ROOT / "scripts")}
    command = [sys.executable, "-c", SLOWLY, ADDRESS, str(tmp_path / "x")]
    part = tmp_path / "x.part" / FIRST
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as process:
        give_up = time.monotonic() + 60
        while not (part.is_file() and part.stat().st_size >= 2 * PIECE):
            assert process.poll() is None
            assert time.monotonic() < give_up
            time.sleep(0.02)
        process.send_signal(number)
    assert process.returncode != 0
    assert not (tmp_path / "x").exists()
    here = part.stat().st_size
    assert 2 * PIECE <= here < len(FILES[FIRST])
    bucket.pace = 0.0
    bucket.ranges.clear()
    main(ADDRESS, tmp_path / "x")
    assert content_of(tmp_path / "x") == FILES
    begins = [int(asked.removeprefix("bytes=").split("-")[0]) for asked in bucket.ranges[key_of(FIRST)] if asked]
    assert min(begins) == here


def damage(answer: Answer) -> Answer:
    changed = bytes([answer.body[0] ^ 1]) + answer.body[1:]
    return Answer(answer.status, answer.headers, changed, answer.whole)


def test_other_bytes_than_recorded_are_noticed(bucket: BucketServer, tmp_path: Path) -> None:
    """In the storage, on the way, and in what an earlier call left here."""
    good = bucket.objects[key_of(FIRST)]
    bucket.objects[key_of(FIRST)] = good[:-1] + bytes([good[-1] ^ 1])
    with pytest.raises(VlmflowError, match=rf"merged/x is damaged: {FIRST}: sha256 .* instead of"):
        main(ADDRESS, tmp_path / "x")
    bucket.objects[key_of(FIRST)] = good
    bucket.faults[FIRST] = [damage]
    with pytest.raises(VlmflowError, match=rf"merged/x is damaged: {FIRST}: sha256"):
        main(ADDRESS, tmp_path / "x")
    assert not (tmp_path / "x").exists()
    (tmp_path / "x.part" / FIRST).write_bytes(b"\0" * PIECE)
    (tmp_path / "x.part" / "model-00002-of-00002.safetensors").write_bytes(b"\0" * 2 * PIECE)
    main(ADDRESS, tmp_path / "x")
    assert content_of(tmp_path / "x") == FILES


@pytest.mark.parametrize("change", ["missing", "shorter", "not in ranges"])
def test_a_damaged_object_is_named(bucket: BucketServer, tmp_path: Path, change: str) -> None:
    if change == "missing":
        del bucket.objects[key_of(FIRST)]
    elif change == "shorter":
        bucket.objects[key_of(FIRST)] = b"short"
    else:
        bucket.faults[FIRST] = [ignores_range()] * 9
    with pytest.raises(VlmflowError, match=rf"merged/x is damaged: {FIRST}: "):
        main(ADDRESS, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_what_an_older_version_left_does_not_stay(bucket: BucketServer, tmp_path: Path) -> None:
    part = tmp_path / "x.part"
    (part / "old").mkdir(parents=True)
    (part / "old" / "file").write_bytes(b"old")
    (part / "empty").write_bytes(b"not empty")
    (tmp_path / "outside").write_bytes(b"outside")
    (part / FIRST).symlink_to(tmp_path / "outside")
    main(ADDRESS, tmp_path / "x")
    assert content_of(tmp_path / "x") == FILES
    assert not (tmp_path / "x" / "old").exists()
    assert (tmp_path / "outside").read_bytes() == b"outside"


def test_a_run_that_replaces_the_folder_meanwhile(bucket: BucketServer, tmp_path: Path) -> None:
    newer = FILES | {FIRST: b"newer" * PIECE}
    del newer["empty"]

    def replace(answer: Answer) -> Answer:
        bucket.store("run/merged/x", newer, "1")
        del bucket.objects[key_of(FIRST)]
        return refuses(404)(answer)

    bucket.faults[key_of(FIRST)] = [replace]
    main(ADDRESS, tmp_path / "x")
    assert content_of(tmp_path / "x") == newer


def test_after_a_replaced_folder_a_passing_fault_is_still_waited_for(
    bucket: BucketServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[bool] = []

    class Pause(threading.Event):  # its own, not those that threads wait for as they begin and end
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(self.is_set())
            return super().wait(timeout)

    monkeypatch.setattr(s3_get, "Event", Pause)

    def replace(answer: Answer) -> Answer:
        bucket.store("run/merged/x", FILES | {FIRST: b"newer" * PIECE}, "1")
        del bucket.objects[key_of(FIRST)]
        bucket.faults[key_of(FIRST, "1")] = [refuses(503)] * 12  # boto3 itself repeats each of the six requests once
        waits.clear()
        return refuses(404)(answer)

    bucket.faults[key_of(FIRST)] = [replace]
    main(ADDRESS, tmp_path / "x")
    assert waits
    assert not any(waits), "a pause of an event that is set is none"


def test_a_target_that_is_a_file(bucket: BucketServer, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "vlmflow")
    bucket.objects["run/data/rows.jsonl"] = rows = b"{}\n" * PIECE
    bucket.metadata["run/data/rows.jsonl"] = {"sha256": "0" * 64}
    with pytest.raises(VlmflowError, match=r"data/rows\.jsonl is damaged: the file: sha256"):
        main("s3://bucket/run/data/rows.jsonl", tmp_path / "rows.jsonl")
    assert not (tmp_path / "rows.jsonl").exists()
    del bucket.metadata["run/data/rows.jsonl"]
    main("s3://bucket/run/data/rows.jsonl", tmp_path / "rows.jsonl")
    assert (tmp_path / "rows.jsonl").read_bytes() == rows
    assert "it has no recorded digest to compare" in caplog.text


def test_a_file_that_changes_meanwhile_is_refused(bucket: BucketServer, tmp_path: Path) -> None:
    bucket.objects["run/data/rows.jsonl"] = b"a" * 3 * PIECE

    def change(answer: Answer) -> Answer:
        bucket.objects["run/data/rows.jsonl"] = b"b" * 3 * PIECE
        return refuses(503)(answer)

    bucket.faults["rows.jsonl"] = [change] * 6
    with pytest.raises(VlmflowError, match="the file: its object has changed"):
        main("s3://bucket/run/data/rows.jsonl", tmp_path / "rows.jsonl")


def test_what_cannot_be_downloaded_is_reported(bucket: BucketServer, tmp_path: Path) -> None:
    with pytest.raises(VlmflowError, match=r"run/none: cannot download it \(FileNotFoundError"):
        main("s3://bucket/run/none", tmp_path / "x")
    for address in ("merged/x", "s3://bucket", "s3:///merged", "https://bucket/merged"):
        with pytest.raises(VlmflowError, match="not the address of a target in S3"):
            main(address, tmp_path / "x")
    for name in ("nul\0", "../../outside", "half \ud800"):
        files = {name: {"size": 1, "sha256": "0" * 64, "key": key_of("a")}}
        bucket.objects["bad/.manifest.json"] = json.dumps({"version": 1, "files": files}).encode()
        with pytest.raises(VlmflowError, match="names a file outside its folder"):
            main("s3://bucket/bad", tmp_path / "x")
    files = {name: {"size": 10**15, "sha256": "0" * 64, "key": key_of("a")} for name in "ab"}
    bucket.objects["bad/.manifest.json"] = json.dumps({"version": 1, "files": files}).encode()
    with pytest.raises(PassingError, match=r"needs 2000000\.00 GB"):
        main("s3://bucket/bad", tmp_path / "x")
    assert not (tmp_path / "x").exists()
