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
    trained_tokens: int = 0
    pictures: int = 1


@dataclass(frozen=True)
class Row:
    """The tokens of one row: text with the chat's marks, pictures, and how many of the text are trained."""

    text: int
    pictures: int
    trained: int

    @property
    def tokens(self) -> int:
        """Those that count against max_length."""
        return self.text + self.pictures


@dataclass(frozen=True)
class RowLengths:
    """Text and picture tokens of each row, in the order of the file.

    trained: those of the text that are trained. shown: the number of pictures, at least 1.
    """

    text: Numbers
    pictures: Numbers
    trained: Numbers
    shown: Numbers

    @classmethod
    def read(cls, file: Path) -> Self:
        """Read a lengths file (`lengths/RUN/SPLIT.jsonl`); raises VlmflowError if a line is damaged."""
        rows = lines_of(file, Length)
        return cls.of((row.text_tokens, row.picture_tokens, row.trained_tokens, row.pictures) for row in rows)

    @classmethod
    def of(cls, rows: Iterable[tuple[int, ...]]) -> Self:
        """Make it from each row's tokens of text and of pictures, trained tokens, and number of pictures.

        The last two may be missing: 0 trained tokens mean that they are unknown, so that the whole text counts as
        trained; and there is one picture.
        """
        found = np.array([(*row, *(0, 1)[len(row) - 2 :]) for row in rows], dtype=np.int64).reshape(-1, 4)
        text, pictures, trained, shown = found.T
        return cls(text, pictures, np.where(trained, trained, text), shown)

    def __len__(self) -> int:
        return len(self.text)

    @property
    def tokens(self) -> Numbers:
        """Of each row, those that count against max_length."""
        return self.text + self.pictures

    def fitted(self, max_length: int, *, shorten: bool = False) -> Self:
        """Return the rows of at most `max_length` tokens. shorten: keep the others too, as long as that."""
        if shorten:
            text = np.minimum(self.text, np.maximum(max_length - self.pictures, 1))
            return replace(self, text=text, trained=np.minimum(self.trained, text))
        return self._only(self.tokens <= max_length)

    def _only(self, chosen: NDArray[np.bool_]) -> Self:
        return type(self)(self.text[chosen], self.pictures[chosen], self.trained[chosen], self.shown[chosen])

    def with_pictures_of(self, most: int) -> Self:
        """Return the rows with pictures of at most so many tokens; those of several sizes may have fewer."""
        return replace(self, pictures=np.minimum(self.pictures, self.shown * most))

    def extremes(self) -> list[Row]:
        """Return the rows that may need the most memory: with more trained or picture tokens than any longer row."""
        order = np.lexsort((-self.pictures, -self.trained, -self.tokens))
        more = np.zeros(len(self), dtype=bool)
        more[:1] = True
        for numbers in (self.trained[order], self.pictures[order]):
            more[1:] |= numbers[1:] > np.maximum.accumulate(numbers)[:-1]
        places = order[more]
        each = (numbers[places].tolist() for numbers in (self.text, self.pictures, self.trained))
        return [Row(*row) for row in zip(*each, strict=True)]

    def densest(self) -> tuple[float, float]:
        """Return the highest shares of a row's tokens that are trained, and that are pictures; 0 without rows."""
        if not len(self):
            return 0.0, 0.0
        return float((self.trained / self.tokens).max()), float((self.pictures / self.tokens).max())

    def grouped(self, size: int) -> NDArray[np.int64]:
        """Return rows in groups of `size`, as a training may draw them: groups × size places, the same each time.

        Rows that fill no group are left out, unless there is none.
        """
        drawn = np.random.default_rng(0).permutation(len(self))
        size = min(size, len(self))
        return drawn[: len(self) // size * size].reshape(-1, size)
