"""Which rows are used: drawn from those of the modality and the requested sources, by the reported source."""

import json
from pathlib import Path
from typing import Any

import pytest

from made_rows import form_rows
from vlmflow.config.data_settings import DatasetSettings
from vlmflow.pictures.resolve import named_paths
from vlmflow.raw.split import open_rows
from vlmflow.rows.convert import convert

TALK = [{"from": "human", "value": "What?"}, {"from": "gpt", "value": "It."}]


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def converted(path: Path, **settings: Any) -> tuple[list[dict[str, Any]], dict[int, str]]:
    """Return the rows made from a file in LLaVA's form, and by row number why a row gave none."""
    dataset = DatasetSettings(kind="volcano", train=str(path), **settings)
    good, bad = path.with_name("good"), path.with_name("bad")
    make = form_rows("volcano", dataset.modality, dataset.columns, None, None)
    with open_rows([path], "train") as rows:
        convert(rows, good, bad, "train", make, dataset.choice("train"), 1)
    made, rejected = ([json.loads(line) for line in file.read_bytes().splitlines()] for file in (good, bad))
    return made, {row["raw_row"]: row["reason"] for row in rejected}


@pytest.mark.parametrize(("modality", "other"), [("text", "has_picture"), ("image", "text_only")])
def test_rows_are_drawn_from_those_of_the_modality(tmp_path: Path, modality: str, other: str) -> None:
    """As many as requested, however few rows have the modality; broken rows may be drawn."""
    rows = [{"conversations": TALK} | ({"image": f"coco/{n}.jpg"} if n % 23 else {}) for n in range(2_000)]
    path = write(tmp_path / "rows.jsonl", rows)
    of_it = 87 if modality == "text" else 1913
    made, reasons = converted(path, modality=modality, max_samples=50)
    assert len(made) == 50
    assert list(reasons.values()).count("not_sampled") == of_it - 50
    assert list(reasons.values()).count(other) == 2_000 - of_it
    if modality == "image":
        choice = DatasetSettings(kind="volcano", train=str(path), modality="image", max_samples=50).choice("train")
        assert list(named_paths([path], "train", choice=choice)) == [row["images"][0] for row in made]


def test_broken_rows_are_found_although_rows_are_drawn(tmp_path: Path) -> None:
    rows = ["{broken", "[]", {"conversations": TALK, "image": 5}, {"conversations": TALK, "image": "a/1.jpg"}]
    made, reasons = converted(write(tmp_path / "rows.jsonl", rows), sources=["a"])
    assert len(made) == 1
    assert reasons == {0: "bad_json", 1: "bad_shape", 2: "bad_shape"}


def test_rows_are_chosen_by_the_source_that_is_reported(tmp_path: Path) -> None:
    """LLaVA's rows name none: their picture's first folder is the source."""
    rows = [
        {"conversations": TALK, "image": "gqa/images/1.jpg"},
        {"conversations": TALK, "image": "coco/1.jpg"},
        {"conversations": TALK, "image": "coco/2.jpg", "source": "gqa"},
        {"conversations": TALK, "images": ["gqa/images/2.jpg"], "source": None},
        {"conversations": TALK, "image": "1.jpg"},
    ]
    path = write(tmp_path / "rows.jsonl", rows)
    made, reasons = converted(path, sources=["gqa"])
    assert [(row["raw_row"], row["source"]) for row in made] == [(0, "gqa"), (2, "gqa"), (3, "gqa")]
    assert reasons == {1: "source_left_out", 4: "source_left_out"}
    assert [row["source"] for row in converted(path, sources=["unknown"])[0]] == ["unknown"]


def test_each_picture_of_a_row_is_requested_once(tmp_path: Path) -> None:
    several = {"conversations": TALK, "image": "x/1.jpg", "images": ["x/1.jpg", "x/2.jpg"]}
    one = {"conversations": TALK, "image": "x/3.jpg", "images": ["x/1.jpg"]}
    path = write(tmp_path / "rows.jsonl", [several, one])
    assert named_paths([path], "train") == {"x/1.jpg": 2, "x/2.jpg": 1, "x/3.jpg": 1}
    made, reasons = converted(path)
    assert not reasons
    assert [row["images"] for row in made] == [["x/1.jpg", "x/2.jpg"], ["x/3.jpg", "x/1.jpg"]]


def test_image_may_be_called_images(tmp_path: Path) -> None:
    """A file with texts under `images`: then no stage reads that key as a list."""
    path = write(tmp_path / "rows.jsonl", [{"conversations": TALK, "images": "gqa/1.jpg"}])
    settings = DatasetSettings(kind="volcano", train=str(path), columns={"image": "images"})
    assert {"conversations", "images", "source"} <= set(settings.read_columns)
    assert "image" not in settings.read_columns
    assert named_paths([path], "train", choice=settings.choice("train")) == {"gqa/1.jpg": 1}
    (row,), reasons = converted(path, columns={"image": "images"}, sources=["gqa"])
    assert (row["images"], reasons) == (["gqa/1.jpg"], {})


def test_a_sample_larger_than_the_file_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"conversations": TALK, "image": f"coco/{n}.jpg"} for n in range(45)]
    path = write(tmp_path / "rows.jsonl", rows)
    with caplog.at_level("INFO"):
        assert len(converted(path, max_samples=45)[0]) == 45
        assert not caplog.records
        assert len(converted(path, max_samples=99_999)[0]) == 45
    assert (
        "the configuration asks for 99,999 rows (max_samples, or #N after the address); the file has 45" in caplog.text
    )
