"""A local source that was replaced: its results are stale, whatever the time of the new file."""

import json
import os
import re
import sys
from pathlib import Path

import pytest
import yaml

from forked_snakemake import called
from workflow_runs import ROOT

TARGETS = {"rows.jsonl": "data/x/stats.json", "model/model.safetensors": "models/m"}


def snakemake(folder: Path, *words: str) -> str:
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
    snakemake(folder, target)
    found = place.stat()
    copy = folder / "copy"
    copy.write_bytes(place.read_bytes())
    os.utime(copy, (found.st_atime, int(found.st_mtime)))
    copy.replace(place)
    assert "Nothing to be done" in snakemake(folder, "-n", target)
    other = folder / "other"
    other.write_bytes(place.read_bytes().replace(b"q", b"Q").replace(b"\0", b"\1"))
    os.utime(other, (1_577_836_800, 1_577_836_800))
    other.replace(place)
    assert "Nothing to be done" not in snakemake(folder, "-n", target)


def test_a_base_that_a_run_makes_is_made_before_the_run(folder: Path) -> None:
    """Both are planned by one call, from a folder in which neither exists."""
    config = yaml.safe_load((folder / "mine.yaml").read_text())
    config["models"]["again"] = {"source": "merged/first", "model_type": "qwen3"}
    config["runs"] = {name: {"model": model, "dataset": "x"} for name, model in (("first", "m"), ("second", "again"))}
    (folder / "mine.yaml").write_text(yaml.safe_dump(config))
    planned = snakemake(folder, "-n", "--", "merged/second")
    assert {"fetch_model", "train_model", "publish_merged"} <= set(re.findall(r"^(\w+) +2$", planned, re.MULTILINE))
