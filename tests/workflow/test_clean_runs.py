"""What `vlmflow clean` lists and deletes in a finished demo folder, and what it never touches."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from vlmflow.supervisor.run_folder import RunFolder
from workflow_runs import ROOT, RUN, copy_folder, stale_rules, vlmflow

OTHER = "0123456789abcdef"
FILES = [str(ROOT / "profiles" / "demo" / "run.yaml"), "quick.yaml"]


def clean(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Call it without a terminal."""
    call = vlmflow("clean", FILES[0], "--also", folder / FILES[1], "--directory", folder, *words)
    return subprocess.run(call, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)


def digest_of(folder: Path, stage: str) -> str:
    return json.loads((folder / "checkpoints" / RUN / stage / "report.json").read_text())["digests"]["job"]


def leave(folder: Path) -> set[Path]:
    """Add leftovers of trials and kills to a finished folder; return those that should be deleted."""
    trainings = folder / "stores" / "runs" / RUN
    full = trainings / "full" / digest_of(folder, "full")
    model = folder / "stores" / "models"
    old = model / f"owner--name@{'0' * 40}"
    left = {
        copy_folder(full, trainings / "full" / OTHER),
        copy_folder(full, trainings / "full" / f"{OTHER}.refused-1"),
        copy_folder(trainings / "smoke" / digest_of(folder, "smoke"), trainings / "smoke" / OTHER),
        trainings / "search" / OTHER,
        copy_folder(next((full / "checkpoints").glob("checkpoint-*")), full / "checkpoints" / "checkpoint-1"),
        folder / "work" / RUN,
        folder / "merged" / f"{RUN}.part",
        model / "views" / "tiny-0000000000000000",
        old,
        folder / "stores" / "pictures" / "gone",
    }
    for place in left:
        place.mkdir(parents=True, exist_ok=True)
        (place / "file").write_text("x" * 100)
    copy = folder / "stores" / "pictures" / ".rewritten" / "unused.png"
    copy.parent.mkdir(exist_ok=True)
    copy.write_text("x")
    return {*left, copy}


@pytest.fixture(scope="module")
def cleaned(demo_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a finished demo folder, whose checkpoint that is neither the last nor the best is already deleted."""
    copy = copy_folder(demo_run, tmp_path_factory.mktemp("cleaned") / "demo_run")
    assert clean(copy, "--yes").returncode == 0
    return copy


@pytest.fixture
def folder(cleaned: Path, tmp_path: Path) -> Path:
    """Return a copy of it."""
    return copy_folder(cleaned, tmp_path / "demo_run")


def everything_in(folder: Path) -> dict[str, int]:
    places = (place for place in folder.rglob("*") if not place.is_relative_to(folder / ".snakemake"))
    kept = (place for place in places if ".seen" not in place.parts)
    return {str(place.relative_to(folder)): place.lstat().st_size for place in kept if not place.is_dir()}


def test_leftovers_are_listed_and_deleted_and_nothing_else(folder: Path) -> None:
    before = everything_in(folder)
    left = leave(folder)
    listed = clean(folder)
    assert listed.returncode == 0, listed.stderr
    for place in left:
        assert f"  {place.relative_to(folder)}\n" in listed.stdout
        assert os.path.lexists(place)
    assert f"total: {len(left)}," in listed.stdout
    assert "there is no terminal to ask on; add --yes to delete" in listed.stdout
    deleted = clean(folder, "--yes")
    assert deleted.returncode == 0, deleted.stderr
    assert everything_in(folder) == before
    assert clean(folder, "--yes").stdout == "nothing to delete\n"
    assert stale_rules(folder) == set()


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: shutil.rmtree(folder / "verified" / RUN),
        lambda folder: (folder / "verified" / RUN / "config.json").write_text("{}"),
        lambda folder: (folder / "merged" / RUN / "provenance.json").unlink(),
        lambda folder: (folder / "merged" / RUN / "config.json").unlink(),
        lambda folder: (folder / "checkpoints" / RUN / "full" / "adapter_model.safetensors").write_bytes(b"x"),
    ],
    ids=["no proof", "other proven files", "not published", "half published", "another adapter"],
)
def test_trainings_of_an_unfinished_run_stay(folder: Path, damage) -> None:
    leave(folder)
    damage(folder)
    listed = clean(folder, "--yes")
    assert listed.returncode == 0, listed.stderr
    assert f"not deleted: {RUN}: keeping its trainings, because it is not finished" in listed.stdout
    trainings = folder / "stores" / "runs" / RUN
    assert (trainings / "full" / OTHER / "checkpoints").is_dir()
    assert (trainings / "full" / digest_of(folder, "full") / "checkpoints" / "checkpoint-1").is_dir()
    assert (trainings / "smoke" / OTHER).is_dir()
    assert (folder / "work" / RUN).is_dir()


def test_a_training_that_is_on_is_refused(folder: Path) -> None:
    leave(folder)
    held = folder / "stores" / "runs" / RUN / "full" / OTHER
    with RunFolder(held).held({}):
        refused = clean(folder, "--yes")
    assert refused.returncode == 1
    assert "is training here" in refused.stderr
    assert (held / "checkpoints").is_dir()


def test_a_store_elsewhere_is_left_alone(folder: Path, tmp_path: Path) -> None:
    left = leave(folder)
    shutil.move(folder / "stores" / "runs", tmp_path / "runs")
    with (folder / "quick.yaml").open("a") as file:
        file.write(f"\nstores: {{runs: {tmp_path / 'runs'}}}\n")
    listed = clean(folder, "--yes")
    assert "(stores.runs): kept, because it is outside" in listed.stdout
    assert (tmp_path / "runs" / RUN / "full" / OTHER).is_dir()
    assert not (folder / "work" / RUN).exists()
    assert left
