"""Counts the tokens of a row by ms-swift's template, without decoding and scaling its pictures.

A row is encoded with small blank pictures, and each distinct size of a picture once: what it has more tokens than a
small one is added. Scaling and cutting pictures is what takes time; a row's text takes a thirtieth of it.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

from vlmflow.pictures.formats import open_picture
from vlmflow.swift.shown_row import IGNORED, picture_token

SMALL = (32, 32)
"""Width and height in pixels of the pictures that stand in for others."""


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
        self._sizes = []
        counts = self.encoded(self._template.encode(row))
        for size in list(self._sizes):
            for place, (tokens, small) in enumerate(zip(self._of_size(size), self._of_size(SMALL), strict=True)):
                counts[place] += tokens - small
        return counts

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
