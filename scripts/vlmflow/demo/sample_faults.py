"""What goes wrong in real downloads, put into rows and pictures on purpose, with what must come of it."""

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
"""EXIF orientation of a picture that is stored with its top at the left, and shown turned right by 90°."""


@dataclass(frozen=True)
class Site:
    """Where a fault is put in.

    row: the raw row, to be changed in place.
    file: its picture, which no other row names.
    scene: what the picture shows.
    earlier: a sound row before it in the same split.
    test_file: a sound picture of the test split, for faults of the train split.
    """

    row: Row
    file: Path
    scene: Scene
    earlier: Row
    test_file: Path | None

    def student(self) -> dict[str, str]:
        """Give the student's first turn."""
        turns: list[dict[str, str]] = self.row["conversations"]
        return turns[0]

    def teacher(self) -> dict[str, str]:
        """Give the teacher's first turn."""
        turns: list[dict[str, str]] = self.row["conversations"]
        return turns[1]


@dataclass(frozen=True)
class Fault:
    """One kind of fault. expected: what the workflow must do with the row; source: where the row is from."""

    expected: Literal["rejected", "kept"]
    put_in: Callable[[Site], None]
    source: str = "vqav2"


def truncated_jpeg(site: Site) -> None:
    """Cut the picture in half: its header is whole, its pixels are not."""
    whole = site.file.read_bytes()
    site.file.write_bytes(whole[: len(whole) // 2])


def missing_file(site: Site) -> None:
    """Remove the picture."""
    site.file.unlink()


def empty_file(site: Site) -> None:
    """Leave nothing of the picture but its name."""
    site.file.write_bytes(b"")


def html_page(site: Site) -> None:
    """Save a server's error page under the picture's name."""
    site.file.write_text("<!DOCTYPE html>\n<html><head><title>404 Not Found</title></head></html>\n")


def tiny_picture(site: Site) -> None:
    """Make the picture smaller than a patch pair of Qwen-VL (28 pixels)."""
    site.scene.draw().resize((20, 16)).save(site.file)


def png_named_jpg(site: Site) -> None:
    """Save the picture as PNG under its .jpg name."""
    site.scene.draw().save(site.file, "PNG")


def gif_named_jpg(site: Site) -> None:
    """Save the picture as GIF, palette and all, under its .jpg name."""
    site.scene.draw().save(site.file, "GIF")


def rgba_png(site: Site) -> None:
    """Save the picture with nothing behind its shapes."""
    site.scene.draw(transparent=True).save(site.file, "PNG")


def exif_rotated(site: Site) -> None:
    """Store the picture lying on its side, with the EXIF orientation that puts it upright."""
    exif = Image.Exif()
    exif[EXIF_ORIENTATION] = TURNED_LEFT
    site.scene.draw().transpose(Image.Transpose.ROTATE_90).save(site.file, "JPEG", quality=95, exif=exif)


def coco_of_2014(site: Site) -> None:
    """Name the COCO picture as of 2014, while it lies among those of 2017."""
    site.row["image"] = site.row["image"].replace("train2017", "train2014")


def backslash_path(site: Site) -> None:
    """Write the picture's path as Windows does."""
    site.row["image"] = site.row["image"].replace("/", "\\")


def dotdot_path(site: Site) -> None:
    """Lead the path out of the picture root and back in."""
    site.row["image"] = f"../pictures/{site.row['image']}"


def absolute_path(site: Site) -> None:
    """Write the path as it is on somebody's machine."""
    site.row["image"] = f"/data/fire/{site.row['image']}"


def no_image_key(site: Site) -> None:
    """Leave the picture out of the row."""
    del site.row["image"]


def tag_in_answer(site: Site) -> None:
    """Write the picture tag into an answer."""
    site.student()["value"] = site.student()["value"].replace("Answer: ", "Answer: As <image> shows: ")


def special_token_in_answer(site: Site) -> None:
    """Write the token that ends a turn into an answer."""
    site.student()["value"] = site.student()["value"].rstrip() + "<|im_end|>\n\n"


def odd_turns(site: Site) -> None:
    """Lose the last feedback."""
    site.row["conversations"].pop()


def wrong_role(site: Site) -> None:
    """Call the student what other data sets call it."""
    site.student()["role"] = "assistant"


def empty_answer(site: Site) -> None:
    """Leave white space alone of an answer."""
    site.student()["value"] = " \n\n"


def empty_question(site: Site) -> None:
    """Leave the picture tag alone of the question."""
    site.row["question"]["value"] = "<image>\n"


def score_field_differs(site: Site) -> None:
    """Let the score field say other than the texts, as real rows do."""
    site.row["score"] = [0, 1]


def unreadable_score(site: Site) -> None:
    """Leave the score out of a feedback."""
    site.teacher()["value"] = "Feedback: " + site.teacher()["value"].split("Feedback: ")[1]


def lone_surrogate(site: Site) -> None:
    """Cut a character outside the first plane in half: JSON can write it (\\ud83d), UTF-8 cannot."""
    site.student()["value"] = site.student()["value"].rstrip() + " \ud83d\n\n"


def duplicate_row(site: Site) -> None:
    """Repeat an earlier row."""
    site.row.clear()
    site.row.update(copy.deepcopy(site.earlier))


def picture_of_test(site: Site) -> None:
    """Put a picture of the test split under the row's own path."""
    assert site.test_file is not None, "this fault is one of the train split"
    site.file.write_bytes(site.test_file.read_bytes())


FAULTS = {
    "truncated_jpeg": Fault("rejected", truncated_jpeg),
    "missing_file": Fault("rejected", missing_file),
    "empty_file": Fault("rejected", empty_file),
    "html_page": Fault("rejected", html_page),
    "tiny_picture": Fault("rejected", tiny_picture),
    "png_named_jpg": Fault("kept", png_named_jpg),
    "gif_named_jpg": Fault("kept", gif_named_jpg),
    "rgba_png": Fault("kept", rgba_png, source="chartqa"),
    "exif_rotated": Fault("kept", exif_rotated),
    "coco_of_2014": Fault("kept", coco_of_2014),
    "backslash_path": Fault("kept", backslash_path),
    "dotdot_path": Fault("rejected", dotdot_path),
    "absolute_path": Fault("rejected", absolute_path),
    "no_image_key": Fault("rejected", no_image_key),
    "tag_in_answer": Fault("rejected", tag_in_answer),
    "special_token_in_answer": Fault("rejected", special_token_in_answer),
    "odd_turns": Fault("rejected", odd_turns),
    "wrong_role": Fault("rejected", wrong_role),
    "empty_answer": Fault("rejected", empty_answer),
    "empty_question": Fault("rejected", empty_question),
    "score_field_differs": Fault("kept", score_field_differs),
    "unreadable_score": Fault("rejected", unreadable_score),
    "lone_surrogate": Fault("rejected", lone_surrogate),
    "duplicate_row": Fault("rejected", duplicate_row),
    "picture_of_test": Fault("rejected", picture_of_test),
}
"""Every fault of the train split, by name."""

TEST_FAULTS = ("truncated_jpeg", "missing_file", "rgba_png", "score_field_differs")
