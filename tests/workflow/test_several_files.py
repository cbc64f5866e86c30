"""Raw files: a split of several is as one file with all of its rows, and one that was replaced makes results stale."""

import json
import os
import re
import sys
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any
from zlib import crc32

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from forked_snakemake import called
from hub_server import REVISION, HubServer, served_hub
from made_rows import write_array
from vlmflow.config.data_settings import DatasetSettings, RowChoice
from vlmflow.config.model import check_config
from vlmflow.config.source import files_of
from vlmflow.core.errors import VlmflowError
from vlmflow.raw.choice import left_out
from vlmflow.raw.split import open_rows
from workflow_runs import ROOT, clone

NAMES = [f"data/train-0000{number}-of-00003.parquet" for number in range(3)]
SHARDS = "hf://datasets/o/d/data/train-*-of-00003.parquet"
LENGTHS = (40, 7, 53)
BROKEN = 43
"""A row of the second file without an answer."""


def parquet(first: int, count: int) -> bytes:
    rows = [{"prompt": f"q{n}", "completion": "" if n == BROKEN else f"a{n}"} for n in range(first, first + count)]
    file = BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), file, row_group_size=16)
    return file.getvalue()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with served_hub(monkeypatch) as hub:
        firsts = [sum(LENGTHS[:number]) for number in range(3)]
        hub.add("datasets/o/d", {name: parquet(*part) for name, *part in zip(NAMES, firsts, LENGTHS, strict=True)})
        yield hub


def snakemake(project: Path, folder: Path, datasets: dict[str, Any], *words: str) -> str:
    shared = {"kind": "prompt_completion", "modality": "text", "image_roots": [], "test": None, "test_share": 0.1}
    config = {"datasets": {name: shared | block for name, block in datasets.items()}}
    (folder / "mine.yaml").write_text(yaml.safe_dump(config))
    call = [sys.executable, "-m", "snakemake", "--snakefile", str(project / "Snakefile"), "--directory", str(folder)]
    call += ["--configfile", str(folder / "mine.yaml"), "--cores", "2", "--", *words]
    done = called(call)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout + done.stderr


def rejected(folder: Path, dataset: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "data" / dataset / "quarantine.jsonl").read_text().splitlines()]


def test_shards_on_the_hub_give_what_one_file_gives(server: HubServer, tmp_path: Path) -> None:
    project = clone(tmp_path / "project")
    (project / "pins.yaml").write_text(f"{SHARDS}:\n  revision: '{REVISION}'\n")
    (tmp_path / "whole.parquet").write_bytes(parquet(0, sum(LENGTHS)))
    datasets = {"shards": {"train": SHARDS}, "whole": {"train": "whole.parquet"}}
    snakemake(
        project, tmp_path, datasets, "data/shards/stats.json", "data/whole/stats.json", "reports/data-shards.html"
    )
    assert server.sent(NAMES[2]) == len(server.repos["datasets/o/d"].files[NAMES[2]])
    for name in ("train", "val", "test"):
        one, other = (tmp_path / "data" / dataset / f"{name}.jsonl" for dataset in datasets)
        assert one.read_bytes() == other.read_bytes() != b""
    (row,), (whole,) = rejected(tmp_path, "shards"), rejected(tmp_path, "whole")
    assert (row.pop("file"), row.pop("file_row")) == (f"raw/shards/{Path(NAMES[1]).name}", BROKEN - LENGTHS[0])
    assert (whole.pop("file"), whole.pop("file_row")) == ("raw/whole/whole.parquet", BROKEN)
    assert row == whole
    stats = json.loads((tmp_path / "data/shards/stats.json").read_text())
    assert [Path(file["file"]).name for file in stats["raw"]["train"]] == [Path(name).name for name in NAMES]
    page = (tmp_path / "reports/data-shards.html").read_text()
    assert "train-00000-of-00003.parquet (3 files)" in page
    assert f"row {BROKEN - LENGTHS[0]} of the file" in page

    quarantine = (tmp_path / "data/shards/quarantine.jsonl").read_text()
    (tmp_path / "fixed.jsonl").write_text(quarantine.replace('"completion":""', '"completion":"fixed"'))
    datasets["shards"]["fixed_rows"] = "fixed.jsonl"
    snakemake(project, tmp_path, datasets, "data/shards/stats.json")
    assert rejected(tmp_path, "shards") == []
    assert any("fixed" in (tmp_path / f"data/shards/{name}.jsonl").read_text() for name in ("train", "val", "test"))


def test_files_of_every_form_are_numbered_through(tmp_path: Path) -> None:
    rows = [{"prompt": f"q{number}"} for number in range(7)]
    write_array(tmp_path / "a.json", rows[:3])
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(row) + "\r\n" for row in rows[3:5]))
    (tmp_path / "c.csv").write_text("prompt\nq5\nq6\nq7,too many\n")
    files = [tmp_path / name for name in ("a.json", "b.jsonl", "c.csv")]
    with open_rows(files, "train") as found:
        assert len(found) == 8
        assert list(map(json.loads, list(found)[:7])) == rows
        assert [found[number] for number in range(8)] == list(found)
        assert list(found.faults) == [7]
        places = [found.locate(number) for number in range(8)]
        assert [(place.file.name[0], place.row) for place in places] == [
            (name, row) for name, count in (("a", 3), ("b", 2), ("c", 3)) for row in range(count)
        ]
        for number in (0, 2, 3, 4):
            place = places[number]
            assert json.loads(place.file.read_bytes()[place.start : place.end]) == rows[number]
        for size in (1, 30, 1000):
            shards = list(found.shards(size))
            assert [number for shard in shards for number in shard] == list(range(8))
            assert [row for shard in shards for row in found.of(shard)] == list(found)
        reason = left_out(found, RowChoice(samples=5, seed=1))
        assert sum(not reason(number) for number in range(8)) == 5


def test_a_fixed_row_of_another_file_is_refused(tmp_path: Path) -> None:
    files = [write_array(tmp_path / name, [{"a": 1}, {"a": 2}]) for name in ("a.json", "b.json")]
    checksum = f"{crc32(json.dumps({'a': 1}).encode()):08x}"
    line = {"split": "train", "row": 2, "file": "raw/x/a.json", "checksum": checksum, "raw": {}}
    (tmp_path / "fixed.jsonl").write_text(json.dumps(line))
    with pytest.raises(
        VlmflowError, match=r"row 2 \(counted from 0\) of raw/x/a.json is not in .*a.json and 1 more, which has 4 rows"
    ):
        open_rows(files, "train", [tmp_path / "fixed.jsonl"])
    (tmp_path / "fixed.jsonl").write_text(json.dumps(line | {"file": "b.json", "raw": {"a": 9}}))
    with open_rows(files, "train", [tmp_path / "fixed.jsonl"]) as rows:
        assert [json.loads(row)["a"] for row in rows] == [1, 2, 9, 2]


@pytest.mark.parametrize(
    ("address", "files"),
    [
        ("a.json", ["a.json"]),
        ("x/train-*-of-2.jsonl", ["x/train-0-of-2.jsonl", "x/train-1-of-2.jsonl"]),
        (SHARDS, [f"hf://datasets/o/d/{name}" for name in NAMES]),
        ("x/*.json", ["x/*.json"]),
        ("x/*-of-000.json", ["x/*-of-000.json"]),
    ],
)
def test_an_address_says_how_many_files_it_stands_for(address: str, files: list[str]) -> None:
    assert files_of(address) == files


def test_a_number_after_an_address_of_several_files_draws_from_all_of_them() -> None:
    settings = DatasetSettings(kind="alpaca", modality="text", train="train-*-of-02.json#30", test=["a.json", "b.json"])
    assert settings.addresses("train") == ["train-00-of-02.json", "train-01-of-02.json"]
    assert settings.addresses("test") == ["a.json", "b.json"]
    assert settings.choice("train").samples == 30
    assert settings.choice("test").samples is None


@pytest.mark.parametrize(
    ("train", "said"),
    [
        (["a/x.json", "b/x.json"], r"datasets.d.train: b/x.json and a/x.json would both become raw/d/x.json"),
        (["a.json#5", "b.json"], r"datasets.d: train: 'a.json#5' is one file of a list; use max_samples to draw"),
        ("hf://datasets/o/d/data/*.parquet", r"'\*' only works where the number of files is given"),
        ([], r"datasets.d.train: \[\] is not allowed"),
        ([7], r"datasets.d.train.0: 7 is not allowed; it must be a text"),
    ],
)
def test_lists_that_cannot_be_are_refused(train: Any, said: str) -> None:
    config = {"models": {}, "runs": {}, "datasets": {"d": {"kind": "alpaca", "modality": "text", "train": train}}}
    with pytest.raises(VlmflowError, match=said):
        check_config(config, [])


TARGETS = {"rows.jsonl": "data/x/stats.json", "model/model.safetensors": "models/m"}


def run_snakemake(folder: Path, *words: str) -> str:
    call = [sys.executable, "-m", "snakemake", "--snakefile", str(ROOT / "Snakefile"), "--directory", str(folder)]
    call += ["--configfile", str(folder / "mine.yaml"), "--cores", "1", *words]
    done = called(call)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout + done.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = [{"prompt": f"q{number:02}", "completion": f"a{number:02}"} for number in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(bytes(200_000))
    config = {
        "datasets": {"x": {"kind": "prompt_completion", "modality": "text", "train": "rows.jsonl"}},
        "models": {"m": {"source": "model", "model_type": "qwen3", "template": "qwen3"}},
    }
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(config))
    return tmp_path


@pytest.mark.parametrize("name", TARGETS)
def test_an_older_file_of_the_same_size_is_another_file(folder: Path, name: str) -> None:
    """It replaced the file that was used; a copy that keeps its time counts as the same file."""
    place, target = folder / name, TARGETS[name]
    run_snakemake(folder, target)
    found = place.stat()
    copy = folder / "copy"
    copy.write_bytes(place.read_bytes())
    os.utime(copy, (found.st_atime, int(found.st_mtime)))
    copy.replace(place)
    assert "Nothing to be done" in run_snakemake(folder, "-n", target)
    other = folder / "other"
    other.write_bytes(place.read_bytes().replace(b"q", b"Q").replace(b"\0", b"\1"))
    os.utime(other, (1_577_836_800, 1_577_836_800))
    other.replace(place)
    assert "Nothing to be done" not in run_snakemake(folder, "-n", target)


def test_a_base_that_a_run_makes_is_made_before_the_run(folder: Path) -> None:
    """Both are planned by one call, from a folder in which neither exists."""
    config = yaml.safe_load((folder / "mine.yaml").read_text())
    config["models"]["again"] = {"source": "merged/first", "model_type": "qwen3"}
    config["runs"] = {name: {"model": model, "dataset": "x"} for name, model in (("first", "m"), ("second", "again"))}
    (folder / "mine.yaml").write_text(yaml.safe_dump(config))
    planned = run_snakemake(folder, "-n", "--", "merged/second")
    assert {"fetch_model", "train_model", "publish_merged"} <= set(re.findall(r"^(\w+) +2$", planned, re.MULTILINE))
