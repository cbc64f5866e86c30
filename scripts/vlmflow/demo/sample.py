"""Faults of real downloads, to insert into rows and pictures, with the expected result of each.

Generates the demo's data: rows in FIRE's raw form about drawn pictures, some of them deliberately broken.
"""

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Literal

import msgspec
from PIL import Image

from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import whole_folder, write_json
from vlmflow.demo.sample_dialogues import Question, Row, questions_about, raw_row
from vlmflow.demo.sample_scenes import Scene, bars_scene, shapes_scene

EXIF_ORIENTATION = 0x0112
TURNED_LEFT = 6
"""The EXIF orientation of a picture that is stored with its top at the left, and shown rotated right by 90°."""


@dataclass(frozen=True)
class Site:
    """The place of a fault.

    row: the raw row, which is changed in place; its first turns are a student's answer and a teacher's feedback.
    file: its picture, which no other row names.
    scene: the picture's content.
    earlier: a valid row before it in the same split.
    test_file: a valid picture of the test split, for faults of the train split.
    """

    row: Row
    file: Path
    scene: Scene
    earlier: Row
    test_file: Path | None


@dataclass(frozen=True)
class Fault:
    """One kind of fault. expected: what the workflow must do with the row. source: the row's source."""

    put_in: Callable[[Site], object]
    expected: Literal["rejected", "kept"] = "rejected"
    source: str = "vqav2"


def _half(site: Site) -> None:
    whole = site.file.read_bytes()
    site.file.write_bytes(whole[: len(whole) // 2])


def _on_its_side(site: Site) -> None:
    exif = Image.Exif()
    exif[EXIF_ORIENTATION] = TURNED_LEFT
    site.scene.draw().transpose(Image.Transpose.ROTATE_90).save(site.file, "JPEG", quality=95, exif=exif)


def _earlier_row(site: Site) -> None:
    site.row.clear()
    site.row.update(copy.deepcopy(site.earlier))


def _picture_of_test(site: Site) -> None:
    assert site.test_file is not None, "this fault is one of the train split"
    site.file.write_bytes(site.test_file.read_bytes())


def _path(change: Callable[[str], str]) -> Callable[[Site], None]:
    """Return what changes the row's path of its picture."""
    return lambda site: site.row.update(image=change(site.row["image"]))


def _turn(number: int, change: Callable[[str], str], **also: str) -> Callable[[Site], None]:
    """Return what changes the text of a turn: 0 is the student's first, 1 the teacher's. also: its other new keys."""

    def put_in(site: Site) -> None:
        turn = site.row["conversations"][number]
        turn.update(also, value=change(turn["value"]))

    return put_in


FAULTS = {
    # The header of the picture is complete, its pixels are not.
    "truncated_jpeg": Fault(_half),
    "missing_file": Fault(lambda site: site.file.unlink()),
    "empty_file": Fault(lambda site: site.file.write_bytes(b"")),
    # A server's error page, saved under the picture's name.
    "html_page": Fault(
        lambda site: site.file.write_text("<!DOCTYPE html>\n<html><head><title>404 Not Found</title></head></html>\n")
    ),
    # Smaller than a patch pair of Qwen-VL (28 pixels).
    "tiny_picture": Fault(lambda site: site.scene.draw().resize((20, 16)).save(site.file)),
    "png_named_jpg": Fault(lambda site: site.scene.draw().save(site.file, "PNG"), "kept"),
    # It has a palette.
    "gif_named_jpg": Fault(lambda site: site.scene.draw().save(site.file, "GIF"), "kept"),
    # Its background is transparent.
    "rgba_png": Fault(lambda site: site.scene.draw(transparent=True).save(site.file, "PNG"), "kept", "chartqa"),
    # Stored with its top at the left; the EXIF orientation puts it upright.
    "exif_rotated": Fault(_on_its_side, "kept"),
    # COCO's picture, named by its path of 2014, while its file is in the folder of 2017.
    "coco_of_2014": Fault(_path(lambda path: path.replace("train2017", "train2014")), "kept"),
    # As Windows writes it.
    "backslash_path": Fault(_path(lambda path: path.replace("/", "\\")), "kept"),
    # It leaves the picture root and returns.
    "dotdot_path": Fault(_path("../pictures/{}".format)),
    # As on somebody's machine.
    "absolute_path": Fault(_path("/data/fire/{}".format)),
    "no_image_key": Fault(lambda site: site.row.pop("image")),
    "tag_in_answer": Fault(_turn(0, lambda text: text.replace("Answer: ", "Answer: As <image> shows: "))),
    # The token that ends a turn.
    "special_token_in_answer": Fault(_turn(0, lambda text: f"{text.rstrip()}<|im_end|>\n\n")),
    # Without the last feedback.
    "odd_turns": Fault(lambda site: site.row["conversations"].pop()),
    # Other data sets' name for the student.
    "wrong_role": Fault(_turn(0, str, role="assistant")),
    # White space alone.
    "empty_answer": Fault(_turn(0, lambda text: " \n\n")),
    # The picture tag alone.
    "empty_question": Fault(lambda site: site.row["question"].update(value="<image>\n")),
    # Other scores than the texts have, as in real rows.
    "score_field_differs": Fault(lambda site: site.row.update(score=[0, 1]), "kept"),
    # A feedback without its score.
    "unreadable_score": Fault(_turn(1, lambda text: "Feedback: " + text.split("Feedback: ")[1])),
    # Half of a character outside the first plane: JSON can write it (\ud83d), UTF-8 cannot.
    "lone_surrogate": Fault(_turn(0, lambda text: f"{text.rstrip()} \ud83d\n\n")),
    "duplicate_row": Fault(_earlier_row),
    # A picture of the test split under the row's own path.
    "picture_of_test": Fault(_picture_of_test),
}
"""Every fault of the train split, by name."""

TEST_FAULTS = ("truncated_jpeg", "missing_file", "rgba_png", "score_field_differs")


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
        test_file = part / PICTURES / test[0]["image"]
        train, train_broken = _make_rows("train", train_rows, train_faults, gallery, rng, test_file)
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
    split: str, count: int, faults: Sequence[str], gallery: Gallery, rng: Random, test_file: Path | None = None
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
