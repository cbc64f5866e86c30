"""The lengths of a split's rows in memory, as arrays: what memory, work and advice are computed from."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from vlmflow.rows.data_rows import lines_of

Numbers = NDArray[np.int64]


class Length(msgspec.Struct):
    """The fields of a line of `lengths/RUN/SPLIT.jsonl` that the estimate reads."""

    text_tokens: int
    picture_tokens: int
    pictures: int = 1


@dataclass(frozen=True)
class Row:
    """The tokens of one row: text with the chat's marks, and pictures."""

    text: int
    pictures: int

    @property
    def tokens(self) -> int:
        """All tokens of the row."""
        return self.text + self.pictures


@dataclass(frozen=True)
class RowLengths:
    """Text and picture tokens of each row, in the order of the file. shown: the number of its pictures, at least 1."""

    text: Numbers
    pictures: Numbers
    shown: Numbers

    @classmethod
    def read(cls, file: Path) -> Self:
        """Read a lengths file (`lengths/RUN/SPLIT.jsonl`); raises VlmflowError if a line is damaged."""
        return cls.of([(row.text_tokens, row.picture_tokens, row.pictures) for row in lines_of(file, Length)])

    @classmethod
    def of(cls, rows: Iterable[tuple[int, ...]]) -> Self:
        """Make it from the tokens of text and of pictures of each row, and the number of pictures, if not 1."""
        found = np.array([(*row, 1)[:3] for row in rows], dtype=np.int64).reshape(-1, 3)
        return cls(found[:, 0], found[:, 1], found[:, 2])

    def __len__(self) -> int:
        return len(self.text)

    @property
    def tokens(self) -> Numbers:
        """All tokens of each row."""
        return self.text + self.pictures

    def fitted(self, max_length: int, *, shorten: bool = False) -> Self:
        """Return the rows of at most `max_length` tokens. shorten: keep the others too, as long as that."""
        if shorten:
            return replace(self, text=np.minimum(self.text, np.maximum(max_length - self.pictures, 1)))
        fits = self.tokens <= max_length
        return type(self)(self.text[fits], self.pictures[fits], self.shown[fits])

    def with_pictures_of(self, image_max_tokens: int) -> Self:
        """Return the rows with a smaller budget for each picture; of pictures that differ in size it is the most."""
        return replace(self, pictures=np.minimum(self.pictures, self.shown * image_max_tokens))

    def extremes(self) -> list[Row]:
        """Return the rows that may need the most memory: most tokens, most text, most of pictures; [] without rows."""
        if not len(self):
            return []
        places = {int(np.argmax(numbers)) for numbers in (self.tokens, self.text, self.pictures)}
        return [Row(int(self.text[place]), int(self.pictures[place])) for place in sorted(places)]
