"""Summarizes the lengths of many rows: sums, quantiles, the longest, and the max_length that covers them."""

import collections
import heapq
import math
from collections.abc import Collection, Iterable
from itertools import accumulate
from typing import Self

from msgspec import UNSET

from vlmflow.lengths.accounts import STEP, MaxLengths, NamedRow, SplitLengths
from vlmflow.lengths.count import RowLength

COVERED = 0.999
"""The share of rows that the recommended max_length covers."""

NAMED = 20
"""How many of the longest rows are named."""


class LengthAccount:
    """Counts rows by their tokens; its memory grows with the distinct lengths, not with the rows.

    most_of_picture: the most tokens of a picture, where those of a row count as equally large.
    """

    def __init__(self) -> None:
        self.text_tokens = 0
        self.picture_tokens = 0
        self.trained_tokens = 0
        self.most_of_picture = 0
        self.rows = 0
        self._longest: list[tuple[int, int, RowLength]] = []  # a heap; among rows of one length it keeps the first
        self._rows_by_tokens: collections.Counter[int] = collections.Counter()

    @classmethod
    def of(cls, lengths: Iterable[RowLength]) -> Self:
        """Return an account of these rows, read once."""
        account = cls()
        for length in lengths:
            account.add(length)
        return account

    def add(self, length: RowLength) -> None:
        """Count one more row; O(log NAMED) for the heap of the longest."""
        self.text_tokens += length.text_tokens
        self.picture_tokens += length.picture_tokens
        self.trained_tokens += length.trained_tokens
        of_each = math.ceil(length.picture_tokens / (1 if length.pictures is UNSET else length.pictures))
        self.most_of_picture = max(self.most_of_picture, of_each)
        self._rows_by_tokens[length.tokens] += 1
        self.rows += 1
        keep = heapq.heappush if len(self._longest) < NAMED else heapq.heappushpop
        keep(self._longest, (length.tokens, -self.rows, length))

    @property
    def longest(self) -> list[RowLength]:
        """The longest rows, the longest first."""
        return [length for _, _, length in sorted(self._longest, reverse=True)]

    def at(self, rank: int) -> int:
        """Return the tokens of the row with this rank by length; the shortest has rank 0."""
        tokens = sorted(self._rows_by_tokens)
        reached = accumulate(self._rows_by_tokens[each] for each in tokens)
        return next(each for each, rows in zip(tokens, reached, strict=True) if rows > rank)

    def covering(self, share: float) -> int:
        """Return the smallest max_length, as a multiple of STEP, that at least this share of the rows fits."""
        return math.ceil(self.at(math.ceil(share * self.rows) - 1) / STEP) * STEP

    def describe(self) -> SplitLengths:
        """Return rows, sums, quantiles and the longest rows; at least one row must have been counted."""
        return SplitLengths(
            rows=self.rows,
            tokens=self.text_tokens + self.picture_tokens,
            text_tokens=self.text_tokens,
            picture_tokens=self.picture_tokens,
            median=self.at(self.rows // 2),
            p99=self.at((self.rows - 1) * 99 // 100),
            longest=[NamedRow(row.id, row.tokens, row.picture_tokens) for row in self.longest],
            trained_tokens=self.trained_tokens,
        )


def max_lengths(accounts: Collection[LengthAccount]) -> MaxLengths:
    """Return the max_length that covers 99.9 % of the rows of each account, and the one that covers all."""
    most, all_rows = (max(account.covering(share) for account in accounts) for share in (COVERED, 1))
    return MaxLengths(most, all_rows)
