"""Pictures shared among several pods: the same bytes for any number of pods, with the real rules."""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forked_snakemake import called
from vlmflow.core.account import RECORDS_FOLDER
from vlmflow.core.errors import VlmflowError
from vlmflow.core.processes import items_of, joined_lines
from vlmflow.pictures.manifest import PictureEntry, read_picture_manifest
from vlmflow.pictures.resolve import join_picture_manifests, write_picture_manifest
from workflow_runs import ROOT, TRAIN_ROWS, command, script, snakemake, speeds

TARGETS = ["images/fire/train.hashes.jsonl", "images/fire/test.hashes.jsonl", "data/fire/stats.json"]


def shared(parts: int) -> list[str]:
    return ["--config", f"cluster={{pods_per_stage: {parts}}}", "--"]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Return the finished folders of one and of three pods."""
    folders = {}
    for parts in (1, 3):
        folder = folders[parts] = tmp_path_factory.mktemp(f"parts-{parts}")
        script("make_sample", folder=folder / "sample", train_rows=TRAIN_ROWS)
        (folder / "quick.yaml").write_text("{}")
        (folder / "said.txt").write_text(snakemake(folder, *shared(parts), *TARGETS))
    return folders


def everything(folder: Path) -> dict[str, str | bytes]:
    """Return the content of a folder: links with their targets in it, files with their bytes.

    Without the `.seen` records, which contain times and inodes.
    """
    return {
        str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in folder.rglob("*")
        if (not path.is_dir() or path.is_symlink()) and RECORDS_FOLDER not in path.parts
    }


def test_any_number_of_pods_gives_the_same_bytes(done: dict[int, Path]) -> None:
    one, several = str(done[1]).encode(), str(done[3]).encode()
    for name in ("images", "data", "stores/pictures"):
        expected, found = everything(done[1] / name), everything(done[3] / name)
        assert sorted(found) == sorted(expected)
        for file, content in expected.items():
            if isinstance(content, str):
                assert found[file] == content.replace(str(done[1]), str(done[3])), file
            else:  # the manifest gives each picture's place
                assert found[file].replace(several, one) == content, file


@pytest.mark.parametrize(("parts", "joins"), [(1, 0), (3, 4)])
def test_every_part_is_a_job_and_one_pod_has_nothing_to_join(done: dict[int, Path], parts: int, joins: int) -> None:
    said = (done[parts] / "said.txt").read_text()
    jobs = dict(re.findall(r"^(\w+) +(\d+)$", said[said.index("Job stats:") :], re.MULTILINE))
    assert int(jobs["resolve_images"]) == int(jobs["hash_pictures"]) == 2 * parts
    assert int(jobs.get("join_images", 0)) + int(jobs.get("join_hashes", 0)) == joins
    assert "Nothing to be done" in snakemake(done[parts], *shared(parts), *TARGETS)


@pytest.mark.parametrize("rule", ["join_images", "join_hashes"])
def test_joining_reports_its_speed(done: dict[int, Path], rule: str) -> None:
    assert set(speeds(done[3], rule).values()) == {"pictures"}


def test_a_setting_of_the_pictures_makes_every_part_again(done: dict[int, Path]) -> None:
    limits = "datasets={fire: {picture_limits: {min_side: 29}}}"
    said = snakemake(done[3], "-n", "--config", limits, *shared(3)[1:], *TARGETS)
    assert re.search(r"^resolve_images +6$", said, re.MULTILINE)
    assert re.search(r"^join_images +2$", said, re.MULTILINE)


@pytest.mark.slow
def test_only_a_failed_part_is_made_again(done: dict[int, Path], tmp_path: Path) -> None:
    """Something that is not a link has the name of one picture in the store."""
    shutil.copytree(done[1] / "sample", tmp_path / "sample")
    (tmp_path / "quick.yaml").write_text("{}")
    entries = enumerate(read_picture_manifest(done[1] / "images/fire/train.jsonl"))
    number, name = next((n % 3 + 1, e.name) for n, e in entries if e.reason is None)
    in_the_way = tmp_path / "stores/pictures/fire" / name
    in_the_way.mkdir(parents=True)
    words = ["images/fire/train.jsonl"]
    failed = called(command(tmp_path, "--keep-going", *shared(3), *words))
    assert failed.returncode == 1
    assert f"resolve_images (logs/resolve_images/fire.train.{number}-of-3.log)" in failed.stderr
    assert len(list((tmp_path / "images/fire").glob("train.*-of-3.jsonl"))) == 2
    in_the_way.rmdir()
    said = snakemake(tmp_path, *shared(3), *words)
    assert re.search(r"^resolve_images +1$", said, re.MULTILINE)
    found = (tmp_path / "images/fire/train.jsonl").read_text()
    assert found.replace(str(tmp_path), str(done[1])) == (done[1] / "images/fire/train.jsonl").read_text()


def test_a_plan_for_the_cluster_has_a_pod_for_every_part(tmp_path: Path) -> None:
    """Without a cluster; the raw files would be fetched from the hub."""
    call = [sys.executable, "-m", "snakemake", "-n", "--profile", "profiles/kubernetes"]
    call += ["--default-storage-prefix", str(tmp_path / "targets"), "--config", "cluster={pods_per_stage: 4}"]
    planned = called([*call, "--", "data/fire/stats.json"], ROOT, os.environ | {"VLMFLOW_NAMESPACE": "vlmflow"})
    said = planned.stdout + planned.stderr
    assert planned.returncode == 0, said[-3000:]
    assert re.search(r"^resolve_images +8$", said, re.MULTILINE)
    assert re.search(r"^join_images +2$", said, re.MULTILINE)
    assert "images/fire/train.4-of-4.jsonl" in said


@given(lines=st.lists(st.integers()), parts=st.integers(1, 9))
def test_parts_are_joined_in_the_original_order(tmp_path_factory, lines: list[int], parts: int) -> None:
    folder = tmp_path_factory.mktemp("parts")
    files = [folder / f"{number}" for number in range(1, parts + 1)]
    for number, file in enumerate(files, start=1):
        file.write_text("".join(f"{line}\n" for line in items_of((number, parts), lines)))
    assert list(map(json.loads, joined_lines(files))) == lines


@pytest.mark.parametrize(
    "contents", [["a\n", "b\nd\n"], ["a\nc\ne\n", "b\n"], ["a\nc", "b\n"], ["", "b\n"], ["a\nd\n", "b\n", "c\nf\n"]]
)
def test_files_that_are_not_parts_of_one_split_are_refused(tmp_path: Path, contents: list[str]) -> None:
    files = [tmp_path / f"{number}.jsonl" for number in range(len(contents))]
    for file, content in zip(files, contents, strict=True):
        file.write_text(content)
    with pytest.raises(VlmflowError, match=r"0.jsonl to \d.jsonl, line \d: these parts do not belong together"):
        list(joined_lines(files))


def test_a_split_without_a_usable_picture_is_refused_when_its_parts_are_joined(tmp_path: Path) -> None:
    """One part may have none; if no part has any, the roots are wrong."""
    missing = [PictureEntry(path=f"{n}.jpg", rows=2, reason="missing", detail="nowhere") for n in range(3)]
    found = PictureEntry(path="3.jpg", rows=1, name="3.jpg", format="JPEG")
    parts = [tmp_path / "1.jsonl", tmp_path / "2.jsonl"]
    write_picture_manifest(parts[0], missing[::2])
    write_picture_manifest(parts[1], missing[1::2])
    with pytest.raises(VlmflowError, match=r"none of 3 pictures can be used; '0.jpg': missing, nowhere") as raised:
        join_picture_manifests(parts, tmp_path / "whole.jsonl", "datasets.fire.image_roots")
    assert "datasets.fire.image_roots" in raised.value.next_step
    assert not (tmp_path / "whole.jsonl").exists()
    write_picture_manifest(parts[1], [missing[1], found])
    join_picture_manifests(parts, tmp_path / "whole.jsonl", "datasets.fire.image_roots")
    assert len((tmp_path / "whole.jsonl").read_bytes().splitlines()) == 4
