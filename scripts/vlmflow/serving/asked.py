"""What `vlmflow try` asks: a row of the val split, or a person's own question.

Two answers beside each other on a terminal.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from PIL import Image
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vlmflow.core.errors import VlmflowError, printable
from vlmflow.lengths.summary import pictures_of
from vlmflow.pictures.decode import AT_USE, plain_picture
from vlmflow.pictures.manifest import Unusable
from vlmflow.pictures.roots import read_picture
from vlmflow.rows.chat import FIRST_LINE, IMAGE_TAG, Turn
from vlmflow.rows.training_data import first_rows
from vlmflow.serving.client import Answer


@dataclass(frozen=True)
class Asked:
    """A question. turns: it, after a system prompt if there is one. pictures: files, one for each picture tag.

    feedback: what the row says about its own first answer; None if it says nothing, or shows a picture there. tools: as
    in a row.
    """

    label: str
    turns: list[Turn]
    pictures: list[Path]
    feedback: str | None = None
    tools: str = ""


def asked_in_val(rows: Path, picture_store: Path) -> Asked:
    """Return the question of the first val row of a run.

    rows: fitted/RUN. picture_store: the folder of all picture stores.

    Raises VlmflowError if the rows are missing, or there are none.
    """
    file = rows / "val.jsonl"
    if not file.is_file() or not (first := first_rows(file, 1)):
        raise VlmflowError(
            f"{file}: has no row to ask about", "ask about your own picture: --picture FILE --ask QUESTION"
        )
    (row,) = first
    index = next(number for number, turn in enumerate(row.conversations) if turn.speaker == "human")
    feedback = next((turn.value for turn in row.conversations[index + 1 :] if turn.speaker == "human"), None)
    if feedback and IMAGE_TAG in feedback:
        feedback = None
    shown = row.until(index + 1)
    pictures = [pictures_of(rows, picture_store) / name for name in shown.images]
    return Asked(f"val row {row.id}", shown.conversations, pictures, feedback, row.tools)


def asked_by_person(question: str, picture: Path | None) -> Asked:
    """Return a person's question, in the form of a training row."""
    return Asked(
        "your question", [Turn("human", (FIRST_LINE if picture else "") + question)], [picture] if picture else []
    )


def opened(file: Path) -> Image.Image:
    """Return a picture as a picture store gives it to the trainer.

    Raises VlmflowError if it cannot be read.
    """
    content = read_picture(os.path.realpath(file), AT_USE.max_bytes)  # in a store it is a link
    picture = content if isinstance(content, Unusable) else plain_picture(content, AT_USE)
    if isinstance(picture, Unusable):
        why = f"{picture.reason}: {picture.detail}"
        raise VlmflowError(f"{file}: cannot be read as a picture: {why}", "name a PNG or JPEG by --picture")
    return picture


def show(console: Console, names: Iterable[str], answers: Iterable[Answer]) -> None:
    """Print answers in columns of equal width, under their models' names."""
    table = Table(box=SIMPLE_HEAD, expand=True, padding=(0, 1))
    for name in names:
        table.add_column(Text(printable(name)), ratio=1, overflow="fold")
    table.add_row(*(Text(_said(answer)) for answer in answers))
    console.print(table)


def _said(answer: Answer) -> str:
    text = lines(answer.text) or "(nothing)"
    return f"{text} …" if answer.cut else text


def lines(text: str) -> str:
    """Return a text of several lines with � for what a terminal might obey."""
    return "\n".join(printable(line) for line in text.strip().splitlines())
