"""Counts each row's tokens without a GPU: text by the model's tokenizer, pictures by its rule.

The lengths of many rows are summed up: quantiles, the longest, and the max_length that covers them.
"""

import collections
import heapq
import math
import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, Self

import msgspec
from msgspec import UNSET, UnsetType
from tokenizers import Tokenizer

from vlmflow.core.account import read_lines
from vlmflow.core.errors import VlmflowError, counted
from vlmflow.core.processes import ordered_map
from vlmflow.core.progress import Progress
from vlmflow.lengths.summary import STEP, MaxLengths, NamedRow, SplitLengths
from vlmflow.pictures.budget import ADVICE, PictureBudget
from vlmflow.pictures.manifest import PictureEntry, name_and_digest, size_of
from vlmflow.raw.json_file import JsonRows
from vlmflow.rows.chat import IMAGE_TAG, dialogue_start
from vlmflow.rows.sharegpt import ShareGptRow
from vlmflow.swift.chat_form import ChatForm

TOKENIZER = "tokenizer.json"
"""The file of a model that determines the lengths of texts; the picture budget finds the one for pictures."""

PLAIN = ChatForm()

NO_TOKEN = re.compile(r"(?!)")
"""A pattern that no text has."""

NAMED = 5
"""Texts with special tokens that the error names."""

SHARD_BYTES = 1 << 20
"""Bytes of rows that a worker takes at a time: large compared with the cost of passing them, small in memory."""


COVERED = 0.999
"""The share of rows that the recommended max_length covers."""

LONGEST_NAMED = 20
"""How many of the longest rows are named."""


class RowLength(msgspec.Struct, frozen=True, gc=False):
    """One row of a training file, as a line of `lengths/RUN/SPLIT.jsonl`.

    start, end: its bytes in the file, without the line's end. picture_tokens: the pad tokens of pictures, after the
    picture budget. text_tokens: all others, also the chat's marks. trained_tokens: those of them that are trained; 0 in
    a file of before. system_turn: whether the row begins with one; false in a file of before. tools: true if the row
    has some. pictures: their number, if there are several.
    """

    id: str
    start: int
    end: int
    text_tokens: int
    picture_tokens: int = 0
    trained_tokens: int = 0
    system_turn: bool = False
    tools: Literal[True] | UnsetType = UNSET
    pictures: int | UnsetType = UNSET

    @property
    def tokens(self) -> int:
        """The tokens that count against train.max_length."""
        return self.text_tokens + self.picture_tokens


class Tokens(NamedTuple):
    """The tokens of a row: those of text, also the chat's marks; the pad tokens of pictures; and the trained ones."""

    text: int
    pictures: int
    trained: int


class Counter(Protocol):
    """What counts the tokens of rows."""

    def measure(self, rows: Sequence[ShareGptRow]) -> list[Tokens]:
        """Return a value for each of `rows`, in their order."""


def read_lengths(file: Path) -> Iterator[RowLength]:
    """Return the lines of a lengths file, in the order of the rows.

    Raises VlmflowError if the file is missing, or a line is damaged.
    """
    return read_lines(file, RowLength, make_again(file))


def make_again(lengths: Path) -> str:
    """Return the next step for a lengths file that has changed: make its folder again."""
    return f"remove {lengths.parent} and run the same command again: the workflow makes it again"


def lines_of(rows: Path, chosen: list[RowLength]) -> bytes:
    """Return some rows of a training file, as lines."""
    with rows.open("rb") as file:
        return b"".join(os.pread(file.fileno(), row.end - row.start, row.start) + b"\n" for row in chosen)


class TokenCounter:
    """Counts the tokens of rows like the trainer: by the model's tokenizer and picture arithmetic.

    model: the base model's folder. pictures: the image manifest of the rows, empty without pictures.
    image_max_tokens: the picture budget (train.image_max_tokens). form: the chat form of the run's template.

    Raises VlmflowError if a file of the model is not what it should be.
    """

    def __init__(
        self, model: Path, pictures: Iterable[PictureEntry], image_max_tokens: int, form: ChatForm = PLAIN
    ) -> None:
        self._form = form
        self._tokenizer = tokenizer_of(model)
        self._budget = PictureBudget.of(model, image_max_tokens)
        usable = (entry for entry in pictures if entry.reason is None)
        self._pictures = {name_and_digest(entry)[0]: self._budget.tokens(*size_of(entry)) for entry in usable}

    def measure(self, rows: Sequence[ShareGptRow]) -> list[Tokens]:
        """Return the tokens of each row; raises as `count` does."""
        trained = self.count_trained(rows)
        return [Tokens(*each, of_answers) for each, of_answers in zip(self.count(rows), trained, strict=True)]

    def count(self, rows: Sequence[ShareGptRow]) -> list[tuple[int, int]]:
        """Return text tokens and picture tokens of each row.

        Raises VlmflowError if a row names a picture that is not in the manifest, or has no token after scaling.
        """
        return [
            (text - len(row.images), self._picture_tokens(row))
            for row, text in zip(rows, self._sums(map(self._form.pieces, rows)), strict=True)
        ]

    def count_trained(self, rows: Sequence[ShareGptRow]) -> list[int]:
        """Return how many tokens of each row are trained."""
        return self._sums(map(self._form.trained, rows))

    def _sums(self, rows: Iterable[list[str]]) -> list[int]:
        """Return the tokens of the pieces of each row, all together."""
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the stage already has a process per core
        pieces = list(rows)
        distinct = list(dict.fromkeys(piece for row in pieces for piece in row))  # rows of one trajectory share turns
        encoded = self._tokenizer.encode_batch_fast(distinct, add_special_tokens=False)
        tokens = dict(zip(distinct, map(len, encoded), strict=True))
        return [sum(map(tokens.__getitem__, row)) for row in pieces]

    def _picture_tokens(self, row: ShareGptRow) -> int:
        try:
            tokens = [self._pictures[name] for name in row.images]
        except KeyError as error:
            raise VlmflowError(
                f"row {row.id}: the image manifest has no picture {error}",
                "resolve the pictures and validate the rows again (vlmflow refresh-pictures FILE NAME)",
            ) from None
        if tokens and self._budget.processor is None:
            raise VlmflowError(
                f"row {row.id} has pictures and the model no preprocessor_config.json, which says how to scale them",
                "copy the file of the model's owner into the model's folder; for one that sees no pictures, set "
                "datasets.NAME.modality: text",
            )
        if 0 in tokens:
            raise VlmflowError(
                f"row {row.id}: picture {row.images[tokens.index(0)]} is so elongated that nothing is left of its "
                f"shorter side at image_max_tokens = {self._budget.most_tokens}; the trainer would stop at it",
                "raise runs.NAME.train.image_max_tokens, or lower datasets.NAME.picture_limits.max_aspect to it",
            )
        return sum(tokens)


def measure_rows(
    rows: Path, counter: Counter, processes: int, special: re.Pattern[str] = NO_TOKEN
) -> Iterator[RowLength]:
    """Yield the length of every row of a training file, in its order, counted in at most `processes` processes.

    special: what no text may contain (`special_tokens`). Memory grows only by 16 bytes per row, for its place in the
    file.

    Raises VlmflowError at the end if texts have special tokens, with their rows, or as the counter does.
    """
    marked: list[str] = []
    with JsonRows(rows) as lines, Progress(f"token lengths of {rows.name}", len(lines), "rows") as progress:
        measure_shard = partial(_measure_shard, lines, counter, special)
        shards = list(lines.shards(SHARD_BYTES))
        for lengths, texts in ordered_map(measure_shard, shards, min(processes, max(1, len(shards)))):
            yield from lengths
            marked += texts
            progress.advance(len(lengths))
    if marked:
        raise VlmflowError(
            f"{rows}: the model's tokenizer reads special tokens in {counted(len(marked), 'text')}: "
            f"{'; '.join(marked[:NAMED])}",
            "change or remove these rows in the raw file; a model with another tokenizer may read them as text",
        )


def _measure_shard(
    lines: JsonRows, counter: Counter, special: re.Pattern[str], shard: range
) -> tuple[list[RowLength], list[str]]:
    """Return the lengths of some rows, and which texts of theirs hold special tokens."""
    decoder = msgspec.json.Decoder(ShareGptRow)
    rows = [decoder.decode(lines[number]) for number in shard]
    marked = []
    for row in rows:
        for index, turn in enumerate(row.conversations):
            if match := special.search(turn.value.replace(IMAGE_TAG, "") if row.images else turn.value):
                marked.append(f"row {row.id}, turn {index}: {match[0]!r}")
    lengths = [
        RowLength(
            *(row.id, lines.starts[number], lines.ends[number], *tokens),
            dialogue_start(row.conversations) > 0,
            True if row.tools else UNSET,
            len(row.images) if len(row.images) > 1 else UNSET,
        )
        for number, row, tokens in zip(shard, rows, counter.measure(rows), strict=True)
    ]
    return lengths, marked


def tokenizer_of(model: Path) -> Tokenizer:
    """Return the tokenizer in a model's folder; raises VlmflowError if it is none."""
    file = model / TOKENIZER
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises nothing more exact
        raise VlmflowError(f"{file}: {error}", ADVICE) from None


def special_tokens(model: Path) -> re.Pattern[str]:
    """Return a pattern of the texts that a model's tokenizer reads as special tokens: its chat's marks.

    Raises VlmflowError if the model has no tokenizer.
    """
    added = tokenizer_of(model).get_added_tokens_decoder().values()
    return re.compile(
        "|".join(sorted(re.escape(token.content) for token in added if token.special)) or NO_TOKEN.pattern
    )


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
        keep = heapq.heappush if len(self._longest) < LONGEST_NAMED else heapq.heappushpop
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
    """Return the max_length that covers 99.9 % of the rows of each account, and the one that covers all.

    They are multiples of STEP.
    """
    longest = (max(each.at(math.ceil(share * each.rows) - 1) for each in accounts) for share in (COVERED, 1))
    return MaxLengths(*(math.ceil(tokens / STEP) * STEP for tokens in longest))
