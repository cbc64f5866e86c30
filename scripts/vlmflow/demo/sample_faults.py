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

    row: the raw row, which is changed in place.
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

    def student(self) -> dict[str, str]:
        """Return the student's first turn."""
        turns: list[dict[str, str]] = self.row["conversations"]
        return turns[0]

    def teacher(self) -> dict[str, str]:
        """Return the teacher's first turn."""
        turns: list[dict[str, str]] = self.row["conversations"]
        return turns[1]


@dataclass(frozen=True)
class Fault:
    """One kind of fault. expected: what the workflow must do with the row. source: the row's source."""

    expected: Literal["rejected", "kept"]
    put_in: Callable[[Site], None]
    source: str = "vqav2"


def truncated_jpeg(site: Site) -> None:
    """Truncate the picture to half: its header is complete, its pixels are not."""
    whole = site.file.read_bytes()
    site.file.write_bytes(whole[: len(whole) // 2])


def missing_file(site: Site) -> None:
    """Remove the picture."""
    site.file.unlink()


def empty_file(site: Site) -> None:
    """Make the picture's file empty."""
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
    """Save the picture as GIF with a palette under its .jpg name."""
    site.scene.draw().save(site.file, "GIF")


def rgba_png(site: Site) -> None:
    """Save the picture with a transparent background."""
    site.scene.draw(transparent=True).save(site.file, "PNG")


def exif_rotated(site: Site) -> None:
    """Store the picture rotated, with the EXIF orientation that puts it upright."""
    exif = Image.Exif()
    exif[EXIF_ORIENTATION] = TURNED_LEFT
    site.scene.draw().transpose(Image.Transpose.ROTATE_90).save(site.file, "JPEG", quality=95, exif=exif)


def coco_of_2014(site: Site) -> None:
    """Name COCO's picture by its path of 2014, while its file is in the folder of 2017."""
    site.row["image"] = site.row["image"].replace("train2017", "train2014")


def backslash_path(site: Site) -> None:
    """Write the picture's path as Windows does."""
    site.row["image"] = site.row["image"].replace("/", "\\")


def dotdot_path(site: Site) -> None:
    """Make the path leave the picture root and return."""
    site.row["image"] = f"../pictures/{site.row['image']}"


def absolute_path(site: Site) -> None:
    """Write an absolute path, as on somebody's machine."""
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
    """Remove the last feedback."""
    site.row["conversations"].pop()


def wrong_role(site: Site) -> None:
    """Use other data sets' name for the student."""
    site.student()["role"] = "assistant"


def empty_answer(site: Site) -> None:
    """Reduce an answer to white space."""
    site.student()["value"] = " \n\n"


def empty_question(site: Site) -> None:
    """Reduce the question to the picture tag."""
    site.row["question"]["value"] = "<image>\n"


def score_field_differs(site: Site) -> None:
    """Let the score field differ from the texts, as in real rows."""
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
    """Save a picture of the test split under the row's own path."""
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
