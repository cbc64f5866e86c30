"""The whole stage: from a shell, killed and restarted, on a full disk, and as a rule."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
import yaml

from archive_server import ArchiveServer, pictures_in, served_archives, zip_of
from drawn_pictures import drawn, encoded
from forked_snakemake import called
from hub_server import command
from workflow_runs import ROOT, speeds

PICTURES = {f"images/{number}.jpg": Random(number).randbytes(20_000) for number in range(400)}
NAMES = [f"gqa/{name}" for number, name in enumerate(PICTURES) if number % 4 == 0]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ArchiveServer]:
    with served_archives(monkeypatch) as archive_server:
        archive_server.files["gqa.zip"] = zip_of(PICTURES)
        yield archive_server


def stage(folder: Path, server: ArchiveServer, names: list[str] = NAMES, **values: object) -> list[str]:
    raw = folder / "train.json"
    raw.write_text(json.dumps([{"image": name} for name in names]))
    sources = {"gqa": {"archive": f"{server.base}/gqa.zip"}}
    return command(
        "fetch_images",
        raw=raw,
        account=folder / "images/train.fetched.json",
        dataset="fire",
        image_roots=[],
        max_bytes=100_000_000,
        **{"sources": sources, "store": folder / "store", **values},
    )


def account_of(folder: Path) -> dict:
    return json.loads((folder / "images/train.fetched.json").read_text())


def test_from_a_shell(server: ArchiveServer, tmp_path: Path) -> None:
    names = [*NAMES, "sam/1.jpg"]
    done = subprocess.run(stage(tmp_path, server, names), capture_output=True, text=True, check=True)
    assert set(pictures_in(tmp_path / "store")) == set(NAMES)
    account = account_of(tmp_path)
    assert (account["wanted"], account["fetched"], account["missing"]) == (101, 100, {"pictures": 1, "rows": 1})
    assert "gqa: 100 pictures, ranges, 2.0 MB: the source has no address for single pictures" in done.stderr
    assert "100 of 100 pictures" in done.stderr
    assert "sam: 1 pictures, 1 rows: by_hand" in done.stderr


@pytest.mark.parametrize("whole", [False, True])
def test_killed_in_the_middle_and_started_again(server: ArchiveServer, tmp_path: Path, whole: bool) -> None:
    """SIGKILL at several moments: a named file is complete, and is not fetched again."""
    server.pace = 0.02 if whole else 0.5  # a range is one block; 16 are fetched at a time
    names = [f"gqa/{name}" for name in PICTURES] if whole else NAMES
    archive_bytes = len(server.files["gqa.zip"])
    for share in (0.1, 0.3, 0.5):
        run = subprocess.Popen(stage(tmp_path, server, names), stderr=subprocess.DEVNULL)
        wanted = archive_bytes if whole else sum(len(PICTURES[name[4:]]) for name in names)
        while server.sent("gqa.zip") < share * wanted:
            assert run.poll() is None, "the run ended before it could be killed"
            time.sleep(0.001)
        run.send_signal(signal.SIGKILL)
        run.wait()
        assert not (tmp_path / "images/train.fetched.json").exists()
        for name, content in pictures_in(tmp_path / "store").items():
            assert name.endswith(".part") or content == PICTURES[name[4:]]
    server.pace = 0
    here = {name for name in pictures_in(tmp_path / "store") if not name.endswith(".part")}
    before = len(server.seen)
    subprocess.run(stage(tmp_path, server, names), capture_output=True, check=True)
    assert pictures_in(tmp_path / "store") == {name: PICTURES[name[4:]] for name in names}
    assert account_of(tmp_path)["had"] == len(here)
    lost = 3 * 16 * 70_000  # bytes in transfer over 16 connections at each kill
    assert server.sent("gqa.zip") <= wanted * 1.05 + 3 * (70_000 + 200) + lost
    assert sum(seen.sent for seen in server.seen[before:]) <= wanted * 1.05


def test_on_a_full_disk(server: ArchiveServer, tmp_path: Path) -> None:
    """The disk fills up and the stage reports it; once there is room, the same command resumes."""
    (tmp_path / "store").mkdir()
    words = stage(tmp_path, server)
    script = f"""
        mount -t tmpfs -o size=1m tmpfs {tmp_path}/store
        {sys.executable} {" ".join(map(_quoted, words[1:]))} && exit 9
        ls -A {tmp_path}/store/gqa/images | wc -l
        find {tmp_path}/store -name '*.part' | wc -l
        mount -o remount,size=64m {tmp_path}/store
        {sys.executable} {" ".join(map(_quoted, words[1:]))} || exit 8
    """
    done = subprocess.run(
        ["unshare", "--mount", "--map-root-user", "bash", "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    kept, unfinished = map(int, done.stdout.split())
    assert "No space left on device" in done.stderr
    assert "put stores.fetched_pictures on a larger disk" in done.stderr
    assert 10 < kept < 60
    assert unfinished == 0
    assert account_of(tmp_path)["had"] == kept


def _quoted(word: str) -> str:
    return "'" + word.replace("'", "'\\''") + "'"


def test_two_splits_at_the_same_time_fetch_a_picture_once(server: ArchiveServer, tmp_path: Path) -> None:
    server.pace = 0.002
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    runs = [
        subprocess.Popen(stage(folder, server, store=tmp_path / "store"), stderr=subprocess.DEVNULL)
        for folder in folders
    ]
    assert [run.wait() for run in runs] == [0, 0]
    figures = [account_of(folder) for folder in folders]
    assert sorted((account["had"], account["fetched"]) for account in figures) == [(0, 100), (100, 0)]
    assert server.sent("gqa.zip") < 1.2 * sum(account["bytes_wanted"] for account in figures)


def test_as_a_rule_before_resolve_images(server: ArchiveServer, tmp_path: Path) -> None:
    """With fetch_images, pictures are fetched and resolved; a second call does nothing."""
    pictures = {f"images/{number}.jpg": encoded(drawn(64 + number, 64), "JPEG") for number in range(6)}
    server.files["gqa.zip"] = zip_of(pictures)
    rows = [{"image": f"gqa/{name}"} for name in pictures]
    for split in ("train", "test"):
        (tmp_path / f"FIRE-{split}.json").write_text(json.dumps(rows))
    run = {
        "models": {"m": {"source": str(tmp_path), "model_type": "qwen3_vl"}},
        "datasets": {
            "pics": {
                "kind": "fire",
                "train": str(tmp_path / "FIRE-train.json"),
                "test": str(tmp_path / "FIRE-test.json"),
                "fetch_images": True,
            }
        },
        "picture_sources": {"gqa": {"archive": f"{server.base}/gqa.zip"}},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    words = [sys.executable, "-m", "snakemake", "--snakefile", ROOT / "Snakefile", "--directory", tmp_path]
    words += ["--cores", "2", "--configfile", tmp_path / "run.yaml", "--", "images/pics/train.jsonl"]
    done = called(words)
    assert done.returncode == 0, done.stderr[-3000:]
    manifest = [json.loads(line) for line in (tmp_path / "images/pics/train.jsonl").read_text().splitlines()]
    assert [entry["name"] for entry in manifest] == [f"gqa/{name}" for name in pictures]
    assert json.loads((tmp_path / "images/pics/train.fetched.json").read_text())["fetched"] == 6
    said = speeds(tmp_path, "fetch_images")
    assert [unit for what, unit in said.items() if what.endswith("fetch_images pics/train")] == ["MB"]
    assert " · 6 of 6 pictures · " in (tmp_path / "logs/fetch_images/pics.train.log").read_text()
    asked = len(server.seen)
    again = called(words)
    assert "Nothing to be done" in again.stderr + again.stdout
    assert len(server.seen) == asked
