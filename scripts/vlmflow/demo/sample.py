"""Generates the demo's data: rows in FIRE's raw form about drawn pictures, some of them deliberately broken."""

import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import whole_folder, write_json
from vlmflow.demo.sample_dialogues import Row, raw_row
from vlmflow.demo.sample_faults import FAULTS, TEST_FAULTS, Site
from vlmflow.demo.sample_questions import Question, questions_about
from vlmflow.demo.sample_scenes import Scene, bars_scene, shapes_scene

TRAIN_FILE = "FIRE-train-100K.json"
TEST_FILE = "FIRE-test.json"
PICTURES = "pictures"
FAULTS_FILE = "faults.json"

SHARED_PICTURES = 0.2
"""The share of valid rows that ask about an earlier row's picture: FIRE has 81,000 pictures for 105,000 rows."""

ROWS_PER_FAULT = 240
"""Each fault occurs once in so many train rows: about one row in ten is faulty."""

BAR_SOURCES = ("chartqa", "dvqa")
PATHS = {
    "vqav2": "coco/train2017/{number:012}.jpg",
    "llava": "coco/train2017/{number:012}.jpg",
    "gqa": "gqa/images/{number}.jpg",
    "textvqa": "textvqa/train_val_images/train_images/{number:016x}.jpg",
    "scienceqa": "scienceqa/images/test/{number}/image.png",
    "geoqa+": "geoqa+/images/{number}.png",
    "chartqa": "chartqa/{split}/png/{number}.png",
    "dvqa": "dvqa/images/bar_{split}_{number:08}.png",
}
"""The form of the pictures' paths in FIRE's rows, by source; the source is not always the first part of the path."""


class BrokenRow(msgspec.Struct, frozen=True):
    """An entry of `faults.json`. row: counted from 0. fault: a key of FAULTS. expected: "rejected" or "kept"."""

    split: str
    row: int
    fault: str
    expected: str


def write_sample(folder: Path, train_rows: int, test_rows: int, seed: int) -> None:
    """Write a small FIRE: the two JSON files, `pictures/`, and `faults.json`.

    The same arguments give the same bytes. `faults.json` lists the deliberate faults (BrokenRow); all other rows are
    valid.

    Raises VlmflowError if there are too few rows for the faults.
    """
    train_faults = list(FAULTS) * max(1, round(train_rows / ROWS_PER_FAULT))
    for split, rows, faults in (("train", train_rows, train_faults), ("test", test_rows, TEST_FAULTS)):
        if rows < 2 * len(faults):
            raise VlmflowError(
                f"{rows} {split} rows are too few for {len(faults)} faulty ones among them",
                f"ask for at least {2 * len(faults)} {split} rows",
            )
    rng = Random(seed)  # noqa: S311 (drawn, not secret)
    with whole_folder(folder) as part:
        gallery = Gallery(part / PICTURES, train_rows + test_rows, rng)
        test, test_broken = _make_rows("test", test_rows, TEST_FAULTS, gallery, rng)
        train, train_broken = _make_rows(
            "train", train_rows, train_faults, gallery, rng, part / PICTURES / test[0]["image"]
        )
        for name, made in ((TRAIN_FILE, train), (TEST_FILE, test)):
            # In ASCII: one fault is a lone surrogate, which JSON can escape but UTF-8 cannot encode.
            (part / name).write_text(json.dumps(made, indent=1) + "\n", encoding="ascii")
        write_json(part / FAULTS_FILE, msgspec.to_builtins(train_broken + test_broken))


class Gallery:
    """Drawn pictures in one folder, with the paths of FIRE's pictures of their sources.

    size: the maximum number of pictures.
    """

    def __init__(self, folder: Path, size: int, rng: Random) -> None:
        self.folder = folder
        self._rng = rng
        # Numbers are unique: COCO's pictures are found by number in any folder.
        self._numbers = iter(rng.sample(range(1000, 600_000), size))

    def add(self, source: str, split: str) -> tuple[str, Scene]:
        """Draw and save one more picture; returns its path relative to the folder, and its content."""
        scene = (bars_scene if source in BAR_SOURCES else shapes_scene)(self._rng)
        image = PATHS[source].format(number=next(self._numbers), split=split)
        file = self.folder / image
        file.parent.mkdir(parents=True, exist_ok=True)
        how: dict[str, Any] = {"quality": 95} if file.suffix == ".jpg" else {}
        scene.draw().save(file, **how)
        return image, scene


def _make_rows(
    split: str,
    count: int,
    faults: Sequence[str],
    gallery: Gallery,
    rng: Random,
    test_file: Path | None = None,
) -> tuple[list[Row], list[BrokenRow]]:
    """Make the rows of a split, and the record of its faults; the first row is always valid."""
    places = rng.sample(range(1, count), len(faults))
    broken = dict(sorted(zip(places, faults, strict=True)))
    rows: list[Row] = []
    sound: Row = {}
    unasked: list[Question] = []
    for number in range(count):
        fault = FAULTS[broken[number]] if number in broken else None
        if fault is None and unasked and rng.random() < SHARED_PICTURES:
            rows.append(sound := raw_row(sound["image"], sound["source"], unasked.pop(), rng))
            continue
        source = fault.source if fault else rng.choice(list(PATHS))
        image, scene = gallery.add(source, split)
        questions = rng.sample(questions_about(scene), 2)
        rows.append(raw_row(image, source, questions.pop(), rng))
        if fault is None:
            sound, unasked = rows[-1], questions
        else:
            fault.put_in(Site(rows[-1], gallery.folder / image, scene, sound, test_file))
    return rows, [BrokenRow(split, number, name, FAULTS[name].expected) for number, name in broken.items()]
