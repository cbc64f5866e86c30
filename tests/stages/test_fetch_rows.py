"""The stage fetch_rows: raw files from the hub and from this machine, kills and resumes, and its rule."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pytest
import yaml

from faulty_server import breaks, html_page, refuses
from hub_server import REVISION, SIGNATURE, TOKEN, HubServer, command, served_hub, sha256
from stages import fetch_rows
from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import unfinished
from vlmflow.fetch.placed import link_or_copy
from workflow_runs import one_rule

SOURCE = "hf://datasets/o/d/sub/train.json"
CONTENT = Random(2).randbytes(4_000_000)
PIN = {"revision": REVISION, "size": len(CONTENT), "sha256": sha256(CONTENT)}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with served_hub(monkeypatch) as hub_server:
        hub_server.add("datasets/o/d", {"sub/train.json": CONTENT})
        yield hub_server


class Place:
    """A working directory, and the stage run in it: in this process, or in its own."""

    def __init__(self, folder: Path) -> None:
        self.raw = folder / "raw" / "fire" / "train.json"
        self.account = folder / "raw" / "fire" / ".fetched" / "train.json.json"
        self.store = folder / "stores" / "raw"
        self.log = folder / "logs" / "fetch.log"
        self.pins = folder / "pins.yaml"
        self.stored = self.store / f"o--d@{REVISION}" / "sub" / "train.json"

    def fetch(self, source: str = SOURCE, **pin: object) -> None:
        self.pins.write_text(yaml.dump({source: {**PIN, **pin}} if source == SOURCE else {}))
        fetch_rows.main(raw=self.raw, account=self.account, source=source, store=self.store, pins=self.pins)

    def command(self, source: str = SOURCE) -> list[str]:
        self.pins.write_text(yaml.dump({SOURCE: PIN}))
        places = {"raw": self.raw, "account": self.account, "store": self.store, "pins": self.pins, "log": self.log}
        return command("fetch_rows", source=source, **places)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_a_pinned_file_is_fetched_once(server: HubServer, place: Place):
    place.fetch()
    assert place.raw.read_bytes() == CONTENT
    assert place.raw.samefile(place.stored)
    asked = len(server.requests)
    place.raw.unlink()
    place.fetch()
    assert place.raw.read_bytes() == CONTENT
    assert len(server.requests) == asked


def test_a_revision_is_enough(server: HubServer, place: Place):
    """Then the hub's digest is checked; files in the store have passed that check."""
    for _ in range(2):
        place.fetch(size=None, sha256=None)
        assert place.raw.read_bytes() == CONTENT
        assert place.raw.samefile(place.stored)
    assert server.sent("train.json") == len(CONTENT)


def test_an_address_may_name_its_commit_itself(server: HubServer, place: Place):
    source = f"hf://datasets/o/d@{REVISION}/sub/train.json"
    place.fetch(source)
    assert place.raw.read_bytes() == CONTENT
    assert place.raw.samefile(place.stored)
    server.add("datasets/o/d", {"sub/train.json": CONTENT[::-1]}, revision="2" * 40)
    place.fetch(source.replace("1" * 40, "2" * 40))
    assert place.raw.read_bytes() == CONTENT[::-1]


def test_a_damaged_store_is_repaired(server: HubServer, place: Place):
    place.fetch()
    place.stored.write_bytes(bytes(len(CONTENT)))
    place.fetch()
    assert place.raw.read_bytes() == CONTENT


def test_unpinned_sources_are_not_fetched(server: HubServer, place: Place):
    with pytest.raises(VlmflowError, match=r"pins\.yaml: hf://.*/train\.json has no revision\n.*`vlmflow pins`"):
        place.fetch(revision=None)
    with pytest.raises(VlmflowError, match=r"is not in pins\.yaml\n.*add a line 'hf://.*`vlmflow pins`"):
        fetch_rows.main(raw=place.raw, account=place.account, source=SOURCE, store=place.store)
    assert not server.requests
    assert not place.raw.exists()


@pytest.mark.parametrize(
    ("changed", "cause"),
    [
        ({"revision": "2" * 40}, f"there is no commit {'2' * 40}"),
        ({"size": 7}, f"size is {len(CONTENT)} on the hub, 7 in pins.yaml"),
        ({"sha256": "0" * 64}, f"sha256 is {sha256(CONTENT)} on the hub, {'0' * 64} in pins.yaml"),
    ],
)
def test_other_pins_are_refused_before_the_first_byte(
    server: HubServer, place: Place, changed: dict[str, object], cause: str
):
    """A moved revision."""
    with pytest.raises(VlmflowError, match=cause):
        place.fetch(**changed)
    assert not server.sent("train.json")
    assert not place.raw.exists()


def test_a_file_outside_lfs_is_compared_with_its_pin_too(server: HubServer, place: Place):
    """The hub has no sha256 of such a file; it is known once the bytes are here."""
    server.add("datasets/o/d", {"sub/train.json": CONTENT}, plain=("sub/train.json",))
    place.fetch()
    place.raw.unlink()
    with pytest.raises(VlmflowError, match=f"{'0' * 64} in pins.yaml"):
        place.fetch(sha256="0" * 64)
    assert not place.raw.exists()


def test_many_network_faults_in_one_download_are_survived(server: HubServer, place: Place):
    """Breaks, refusals and an HTML page in one download; nothing secret is reported."""
    server.faults[("head", "sub/train.json")] = [refuses(429, Retry_After="1")]
    server.faults[("bytes", "sub/train.json")] = [breaks(1_500_000, "reset"), html_page(), breaks(1_500_000)]
    done = subprocess.run(place.command(), capture_output=True, text=True, timeout=60)
    said = done.stdout + done.stderr + place.log.read_text()
    assert done.returncode == 0, said
    assert place.raw.read_bytes() == CONTENT
    for sign in ("429", "reset by peer", "HTML page"):
        assert sign in said
    assert TOKEN not in said
    assert SIGNATURE not in said


def test_a_refusal_ends_with_what_to_do(server: HubServer, place: Place):
    server.repos["datasets/o/d"].gated = True
    done = subprocess.run(place.command(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    cause, next_step = done.stderr.splitlines()[-2:]
    assert cause.startswith(f"the stage failed: {SOURCE} is gated")
    assert next_step.startswith("  what to do: accept its terms")
    said = done.stdout + done.stderr + place.log.read_text()
    assert "Traceback" not in said
    assert TOKEN not in said


def test_a_killed_fetch_resumes_where_it_was(server: HubServer, place: Place):
    """SIGKILL in the middle; nothing is fetched twice and nobody must clean up."""
    server.pace = 0.02
    part = unfinished(place.stored)
    for least in (500_000, 1_500_000):
        process = subprocess.Popen(place.command(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while not part.exists() or part.stat().st_size < least:
            assert process.poll() is None
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert not place.raw.exists()
    kept = part.stat().st_size
    server.pace = 0.0
    place.fetch()
    assert place.raw.read_bytes() == CONTENT
    assert server.ranges("train.json")[0] is None
    assert server.ranges("train.json")[-1] == f"bytes={kept}-"
    assert not part.exists()


def test_two_processes_that_fetch_the_same_file_share_it(server: HubServer, place: Place, tmp_path: Path):
    server.pace = 0.02
    other = Place(tmp_path)
    other.raw = tmp_path / "elsewhere" / "train.json"
    running = [subprocess.Popen(here.command(), stderr=subprocess.DEVNULL) for here in (place, other)]
    assert [process.wait(60) for process in running] == [0, 0]
    assert place.raw.read_bytes() == other.raw.read_bytes() == CONTENT
    assert server.sent("train.json") == len(CONTENT)


@pytest.mark.parametrize("form", ["{}", "file://{}"])
def test_a_local_file_is_copied(place: Place, tmp_path: Path, caplog: pytest.LogCaptureFixture, form: str):
    caplog.set_level("INFO", "vlmflow")
    local = tmp_path / "a_file.json"
    local.write_bytes(CONTENT)
    fetch_rows.main(raw=place.raw, account=place.account, source=form.format(local), store=place.store)
    assert place.raw.read_bytes() == CONTENT
    assert not place.raw.samefile(local)
    assert f"{len(CONTENT)} bytes, sha256 {sha256(CONTENT)}" in caplog.text
    assert json.loads(place.account.read_text()) == {"bytes": len(CONTENT), "sha256": sha256(CONTENT)}


def test_a_local_path_that_is_not_a_file_is_reported(place: Place, tmp_path: Path):
    with pytest.raises(VlmflowError, match=r"nowhere\.json does not exist"):
        place.fetch(f"{tmp_path}/nowhere.json")
    with pytest.raises(VlmflowError, match=f"{tmp_path} is a folder, not a file"):
        place.fetch(str(tmp_path))
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(VlmflowError, match=f"{tmp_path}/empty.jsonl is empty"):
        place.fetch(f"{tmp_path}/empty.jsonl")


def test_another_disk_gets_a_copy(tmp_path: Path):
    shared_memory = Path("/dev/shm")  # noqa: S108
    assert shared_memory.stat().st_dev != tmp_path.stat().st_dev
    (tmp_path / "stored").write_bytes(CONTENT)
    with TemporaryDirectory(dir=shared_memory) as folder:
        link_or_copy(tmp_path / "stored", Path(folder, "raw"))
        assert Path(folder, "raw").read_bytes() == CONTENT


def test_the_rule_plans_without_a_network_and_sees_what_is_stale(server: HubServer, tmp_path: Path):
    (tmp_path / "local.json").write_bytes(b"[]")
    datasets = {
        "a": {"kind": "fire", "train": SOURCE, "test": "local.json"},
        "b": {"kind": "fire", "train": "hf://datasets/o/d/not_pinned.json"},
    }
    targets = ("raw/a/train.json", "raw/a/local.json")
    snakemake = one_rule(tmp_path, "fetch_rows", datasets=datasets)
    pins = tmp_path / "pins.yaml"
    pins.write_text(yaml.safe_dump({SOURCE: {"revision": REVISION}, "hf://datasets/o/d/not_pinned.json": None}))

    assert "Fetching not_pinned.json" in snakemake(*targets, "raw/b/not_pinned.json", "-n")
    assert not server.requests
    assert "2 of 2 steps" in snakemake(*targets)
    assert (tmp_path / "raw/a/train.json").read_bytes() == CONTENT
    assert (tmp_path / "raw/a/local.json").read_bytes() == b"[]"
    pins.touch()
    assert "Nothing to be done" in snakemake(*targets)
    pins.write_text(yaml.safe_dump({SOURCE: {"revision": REVISION, "size": len(CONTENT)}}))
    assert "Nothing to be done" in snakemake(*targets), "what was filled in says no other about the revision"
    (tmp_path / "local.json").write_bytes(b"[1]")
    pins.write_text(yaml.safe_dump({SOURCE: {"revision": "2" * 40}}))
    planned = snakemake(*targets, "-n")
    assert "Params have changed" in planned
    assert "Updated input files: local.json" in planned
