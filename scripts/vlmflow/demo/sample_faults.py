"""Faults of real downloads, to insert into rows and pictures, with the expected result of each."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from PIL import Image

from vlmflow.demo.sample_dialogues import Row
from vlmflow.demo.sample_scenes import Scene

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
