"""Counts the tokens of rows with ms-swift's own template, as long as its parent sends some.

    python -m vlmflow.swift.row_counter CONNECTION HOW WHERE --model FOLDER …

CONNECTION is the number of an inherited file descriptor, a `multiprocessing.connection.Connection`. Each message is
JSON lines of ShareGPT rows; the answer is a JSON list with [tokens, picture tokens, trained tokens] of each row, or an
object: "failed", the error, and "row", the id of the row; or "difference", how the model's own chat template differs in
one of them (`served_rows.first_difference`). HOW: BY_SIZE if pictures may be counted by their sizes, WHOLE to encode
them. WHERE: COMPARED if the rows are compared with that template, else ALONE. ms-swift's own arguments follow; the
working directory is for this process alone.

By their sizes, a row is encoded with small blank pictures, and each distinct size of a picture once: what it has more
tokens than a small one is added. Scaling and cutting pictures is what takes time; a row's text takes a thirtieth of it.
"""

import json
import os
import shutil
import sys
from collections.abc import Mapping
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec

from vlmflow.core.processes import die_with_parent
from vlmflow.pictures.decode import open_picture
from vlmflow.rows.sharegpt import ShareGptRow
from vlmflow.swift.child_process import quick_imports
from vlmflow.swift.served_rows import SMALL, first_difference, picture_token

BY_SIZE, WHOLE = "by-size", "whole"

COMPARED, ALONE = "compared", "alone"

ROWS = Path("rows.jsonl")
"""The rows of one message, in the working directory."""

IGNORED = -100
"""The label of a token that is not trained (torch.nn.CrossEntropyLoss, ignore_index)."""


class RowCounter:
    """Counts rows with a template of ms-swift, which has its pictures from this object from now on.

    whole: whether rows are encoded with their pictures instead.
    """

    def __init__(self, template: Any, *, whole: bool) -> None:
        from swift.template import base

        self._template = template
        self._pad = picture_token(template.processor)
        self._sizes: list[tuple[int, int]] = []
        if not whole:  # else no size is ever seen
            base.load_image = self._blank
        self._of_size = cache(self._count_size)

    def count(self, row: Mapping[str, Any]) -> list[int]:
        """Return the tokens of a row, those of them that are pictures', and those that are trained."""
        return self.encode(row)[0]

    def encode(self, row: Mapping[str, Any]) -> tuple[list[int], list[int]]:
        """Return these counts, and the row's tokens, with those of small pictures where these stand in for others."""
        self._sizes = []
        encoded = self._template.encode(row)
        counts = self.encoded(encoded)
        for size in list(self._sizes):
            for index, (tokens, small) in enumerate(zip(self._of_size(size), self._of_size(SMALL), strict=True)):
                counts[index] += tokens - small
        return counts, list(encoded["input_ids"])

    def encoded(self, row: Mapping[str, Any]) -> list[int]:
        """Return these counts of a row that the template has already encoded."""
        ids = list(row["input_ids"])
        return [len(ids), ids.count(self._pad), sum(label != IGNORED for label in row["labels"])]

    def _count_size(self, size: tuple[int, int]) -> list[int]:
        from PIL import Image

        turns = [{"role": "user", "content": "<image>"}, {"role": "assistant", "content": "It is."}]
        return self.encoded(self._template.encode({"messages": turns, "images": [Image.new("RGB", size)]}))

    def _blank(self, picture: Any) -> Any:
        """Take the place of ms-swift's `load_image`: of a file only its header is read."""
        from PIL import Image
        from swift.template.vision_utils import load_file

        if isinstance(picture, Image.Image):
            return picture
        with open_picture(load_file(picture)) as opened:
            self._sizes.append(opened.size)
        return Image.new("RGB", SMALL)


def main() -> None:
    """Answer until the parent closes the connection."""
    die_with_parent(os.getppid())
    connection: Connection[Any, Any] = Connection(int(sys.argv[1]))
    with quick_imports():
        from vlmflow.swift.own_template import own_template

        template = own_template(sys.argv[4:])
        counter = RowCounter(template, whole=sys.argv[2] == WHOLE)
    processor = template.processor if sys.argv[3] == COMPARED else None
    while True:
        try:
            lines = connection.recv_bytes()
        except EOFError:
            return
        connection.send_bytes(json.dumps(_counted(counter, lines, processor)).encode())


def _counted(counter: RowCounter, lines: bytes, processor: Any) -> list[list[int]] | dict[str, Any]:
    """Return the answer to a message. processor: whose chat template the rows are compared with; None for none."""
    from swift.dataset import load_dataset

    ROWS.write_bytes(lines)
    dataset, _ = load_dataset([str(ROWS.absolute())], strict=True)
    counts: list[list[int]] = []
    tokens: list[list[int]] = []
    try:
        for row in dataset:
            count, ids = counter.encode(row)
            counts.append(count)
            tokens.append(ids)
    except Exception as error:  # whatever a template raises
        failing = json.loads(lines.splitlines()[len(counts)])
        return {"row": str(failing["id"]), "failed": f"{type(error).__name__}: {error}"}
    finally:
        shutil.rmtree(os.environ["HF_DATASETS_CACHE"], ignore_errors=True)  # the rows, as Arrow
    if processor is not None:
        rows = [msgspec.json.decode(line, type=ShareGptRow) for line in lines.splitlines()]
        if difference := first_difference(processor, rows, tokens):
            return {"difference": difference}
    return counts


if __name__ == "__main__":
    main()
