"""The demo's data: valid rows are valid, and each faulty row has the fault that faults.json gives it."""

import hashlib
import inspect
import io
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from random import Random

import pytest
import yaml
from PIL import Image, ImageOps

from simulated_evaluations import choose_rows
from vlmflow.config.data_settings import PictureLimits, RowLimits
from vlmflow.core.errors import VlmflowError
from vlmflow.demo.sample import FAULTS, PATHS, TEST_FAULTS, Site, write_sample
from vlmflow.demo.sample_scenes import shapes_scene
from vlmflow.evaluation.report import FEWEST_GROUPS
from vlmflow.raw.json_file import JsonRows
from vlmflow.rows import sharegpt
from vlmflow.rows.chat import Reject
from vlmflow.rows.forms.fire import read_trajectory
from vlmflow.rows.holdout import group_of, half_of, hold_out
from vlmflow.rows.trajectories import Trajectory, trajectory_row
from vlmflow.tools import make_sample
from workflow_runs import ROOT

pytestmark = pytest.mark.lengthy

TRAIN_ROWS, TEST_ROWS = 240, 48
FILES = {"train": "FIRE-train-100K.json", "test": "FIRE-test.json"}
MAKE_SAMPLE = ROOT / "scripts" / "vlmflow" / "tools" / "make_sample.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sample") / "fire"
    write_sample(folder, TRAIN_ROWS, TEST_ROWS, seed=42)
    return folder


@pytest.fixture(scope="module")
def splits(folder):
    return {split: json.loads((folder / name).read_bytes()) for split, name in FILES.items()}


@pytest.fixture(scope="module")
def record(folder):
    return {(fault["split"], fault["row"]): fault for fault in json.loads((folder / "faults.json").read_bytes())}


def understood(row: dict) -> Trajectory | Reject:
    """Return what the workflow makes of a row from its text only."""
    trajectory = read_trajectory(json.dumps(row).encode())
    if isinstance(trajectory, Reject):
        return trajectory
    return sharegpt.first_fault(trajectory_row("id", trajectory), RowLimits()) or trajectory


def tree_digest(folder: Path) -> dict[str, str]:
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def test_two_runs_write_the_same_bytes_whatever_was_there(tmp_path, folder):
    again = tmp_path / "fire"
    again.mkdir()
    (again / "leftover.json").write_text("[]")
    write_sample(again, TRAIN_ROWS, TEST_ROWS, seed=42)
    assert tree_digest(again) == tree_digest(folder)
    write_sample(again, TRAIN_ROWS, TEST_ROWS, seed=43)
    assert tree_digest(again) != tree_digest(folder)


def test_words_and_places_are_the_same_under_every_python(folder):
    """The digest is the same under Python 3.11, 3.12 and 3.13; change it together with the generator."""
    texts = hashlib.sha256(b"".join((folder / name).read_bytes() for name in (*FILES.values(), "faults.json")))
    assert texts.hexdigest() == "cab7f033d5545c419d7a04b75bdfb942ed647d69d0f7c6fc4ebf7cfc864d067c"


def test_valid_rows_pass_every_rule_on_rows(splits, record):
    for split, rows in splits.items():
        for number, row in enumerate(rows):
            if (split, number) not in record:
                trajectory = understood(row)
                assert isinstance(trajectory, Trajectory), (split, number, trajectory)
                assert not trajectory.score_field_differs
                assert row["round"] == len(trajectory.attempts) in (2, 3)


def test_valid_rows_have_valid_pictures(folder, splits, record):
    limits = PictureLimits()
    for split, rows in splits.items():
        for number, row in enumerate(rows):
            if (split, number) not in record:
                with Image.open(folder / "pictures" / row["image"]) as picture:
                    picture.load()
                    assert picture.mode == "RGB"
                    assert picture.format == ("JPEG" if row["image"].endswith(".jpg") else "PNG")
                    assert min(picture.size) >= limits.min_side


def test_no_valid_row_is_duplicated_and_no_picture_is_in_both_splits(folder, splits, record):
    sound = {
        split: [row for number, row in enumerate(rows) if (split, number) not in record]
        for split, rows in splits.items()
    }
    pictures = {
        split: {hashlib.sha256((folder / "pictures" / row["image"]).read_bytes()).digest() for row in rows}
        for split, rows in sound.items()
    }
    assert not pictures["train"] & pictures["test"]
    for rows in sound.values():
        assert len({(row["image"], str(row["question"]), str(row["conversations"])) for row in rows}) == len(rows)
        assert len({row["image"] for row in rows}) < len(rows), "no picture is shared by two rows"


def test_rows_look_like_those_of_fire(splits):
    rows = [row for split in splits.values() for row in split if "image" in row]
    tags = sum("<image>" in row["question"]["value"] for row in rows) / len(rows)
    assert 0.1 < tags < 0.3
    feedback = [turn["value"] for row in rows for turn in row["conversations"] if turn["role"] == "teacher"]
    for form in ("Score: 10.\n", "Score: 10/10.\n", "Score: 10. Feedback"):
        assert any(text.startswith(form) for text in feedback), form
    texts = Counter(turn["value"] for row in rows for turn in row["conversations"])
    assert len(texts) > 0.8 * texts.total()
    assert {row["source"] for row in rows} == set(PATHS)


def test_every_fault_is_there_once_and_about_one_train_row_in_ten_has_one(splits, record):
    counts = {split: Counter() for split in FILES}
    for (split, number), fault in record.items():
        assert number < len(splits[split])
        assert fault["expected"] == FAULTS[fault["fault"]].expected
        counts[split][fault["fault"]] += 1
    assert counts["train"] == Counter(list(FAULTS))
    assert counts["test"] == Counter(TEST_FAULTS)
    assert 0.08 < counts["train"].total() / TRAIN_ROWS < 0.12


ROW_FAULTS = {
    "no_image_key": "bad_shape",
    "tag_in_answer": "stray_tag",
    "special_token_in_answer": "special_token",
    "odd_turns": "unbalanced_turns",
    "wrong_role": "wrong_role",
    "empty_answer": "empty_turn",
    "empty_question": "empty_turn",
    "unreadable_score": "unreadable_score",
    "lone_surrogate": "bad_json",
}


def decodes(content: bytes) -> bool:
    try:
        Image.open(io.BytesIO(content)).load()
    except OSError:
        return False
    return True


def is_picture(content: bytes, kind: str, mode: str) -> bool:
    picture = Image.open(io.BytesIO(content))
    picture.load()
    return picture.format == kind and picture.mode == mode


def opens_but_is_cut(content: bytes) -> bool:
    return Image.open(io.BytesIO(content)).format == "JPEG" and not decodes(content)


def lies_on_its_side(content: bytes) -> bool:
    picture = Image.open(io.BytesIO(content))
    return picture.format == "JPEG" and picture.getexif()[0x0112] == 6


PICTURE_FAULTS = {
    "truncated_jpeg": opens_but_is_cut,
    "empty_file": lambda content: content == b"",
    "html_page": lambda content: content.startswith(b"<!DOCTYPE html>"),
    "tiny_picture": lambda content: max(Image.open(io.BytesIO(content)).size) < 28,
    "png_named_jpg": lambda content: is_picture(content, "PNG", "RGB"),
    "gif_named_jpg": lambda content: is_picture(content, "GIF", "P"),
    "rgba_png": lambda content: is_picture(content, "PNG", "RGBA"),
    "exif_rotated": lies_on_its_side,
}

PATH_FAULTS = {
    "coco_of_2014": lambda image: image.replace("train2014", "train2017") != image,
    "backslash_path": lambda image: "/" not in image and "\\" in image,
    "dotdot_path": lambda image: image.startswith("../"),
    "absolute_path": lambda image: image.startswith("/"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_what_its_name_says(name, folder, splits, record):
    (number,) = [row for (split, row), fault in record.items() if split == "train" and fault["fault"] == name]
    row = splits["train"][number]
    rejected_by_text = isinstance(understood(row), Reject)
    assert rejected_by_text == (name in ROW_FAULTS)
    if name in ROW_FAULTS:
        assert understood(row).reason == ROW_FAULTS[name]
    elif name in PATH_FAULTS:
        assert PATH_FAULTS[name](row["image"])
    elif name == "missing_file":
        assert not (folder / "pictures" / row["image"]).exists()
    elif name in PICTURE_FAULTS:
        assert PICTURE_FAULTS[name]((folder / "pictures" / row["image"]).read_bytes())
    elif name == "score_field_differs":
        assert understood(row).score_field_differs
    elif name == "duplicate_row":
        assert row in splits["train"][:number]
    elif name == "picture_of_test":
        content = (folder / "pictures" / row["image"]).read_bytes()
        test = {(folder / "pictures" / other["image"]).read_bytes() for other in splits["test"][:1]}
        assert content in test
        assert row["image"] not in {other["image"] for other in splits["test"]}
    else:
        pytest.fail(f"nothing checks {name}")


def test_the_misnamed_paths_have_their_pictures(folder, splits, record):
    """The rows with these two faults must be kept: the picture exists under the intended name."""
    for (split, number), fault in record.items():
        image = splits[split][number].get("image", "")
        if fault["fault"] == "coco_of_2014":
            assert (folder / "pictures" / image.replace("2014", "2017")).is_file()
        if fault["fault"] == "backslash_path":
            assert (folder / "pictures" / image.replace("\\", "/")).is_file()


def test_an_upright_exif_picture_shows_what_was_drawn(tmp_path):
    scene = shapes_scene(Random(3))
    file = tmp_path / "x.jpg"
    FAULTS["exif_rotated"].put_in(Site({}, file, scene, {}, None))
    upright = ImageOps.exif_transpose(Image.open(file))
    assert upright.size == scene.size
    for thing in scene.things:
        middle = ((thing.box[0] + thing.box[2]) // 2, (thing.box[1] + thing.box[3]) // 2)
        drawn = scene.draw().getpixel(middle)
        assert all(abs(a - b) < 40 for a, b in zip(upright.getpixel(middle), drawn, strict=True))


def test_the_files_are_split_into_rows_in_spite_of_their_faults(folder):
    for split, rows in (("train", TRAIN_ROWS), ("test", TEST_ROWS)):
        with JsonRows(folder / FILES[split]) as raw:
            assert len(raw) == rows


def test_too_few_rows_for_the_faults_are_refused(tmp_path):
    with pytest.raises(VlmflowError, match="30 train rows are too few") as caught:
        write_sample(tmp_path / "fire", 30, 48, seed=1)
    assert "at least 50" in caught.value.next_step
    assert not (tmp_path / "fire").exists()


def test_the_script_writes_the_same_sample(tmp_path, folder):
    rows = ["--train-rows", str(TRAIN_ROWS)]
    subprocess.run([sys.executable, MAKE_SAMPLE, "--folder", tmp_path / "fire", *rows], check=True)
    assert tree_digest(tmp_path / "fire") == tree_digest(folder)


def test_half_of_the_demo_s_val_suffices_for_a_verdict(tmp_path):
    """`make demo` holds 240 pictures out: one half chooses the checkpoint, the other has enough to judge it."""
    rows = inspect.signature(make_sample.main).parameters["train_rows"].default
    share = yaml.safe_load((ROOT / "profiles/demo/run.yaml").read_text())["datasets"]["fire"]["val_share"]
    write_sample(tmp_path / "fire", rows, TEST_ROWS, seed=42)
    faulty = {fault["row"] for fault in json.loads((tmp_path / "fire" / "faults.json").read_bytes())}
    raw = json.loads((tmp_path / "fire" / FILES["train"]).read_bytes())
    valid = [row for number, row in enumerate(raw) if number not in faulty]
    pictures = tmp_path / "fire" / "pictures"
    digests = {row["image"]: hashlib.sha256((pictures / row["image"]).read_bytes()) for row in valid}
    groups = Counter(digests[row["image"]].digest() for row in valid)
    val = hold_out(groups, share, "42", frozenset())
    held = [row for row in valid if digests[row["image"]].digest() in val]
    cases = [trajectory_row(str(number), understood(row)) for number, row in enumerate(held)]
    names = {name: digest.hexdigest() for name, digest in digests.items()}
    half = half_of((group_of(case, names) for case in cases), "judges")
    chosen, out = choose_rows(
        cases,
        names,
        {str(number): row["groundtruth"]["value"] for number, row in enumerate(held)},
        seed=42,
        half=half,
    )
    assert len(val) >= 240
    assert len({row.case.group for row in chosen}) >= FEWEST_GROUPS, Counter(each.reason for each in out)
    assert len(chosen) > 0.8 * sum(group_of(case, names) in half for case in cases)
