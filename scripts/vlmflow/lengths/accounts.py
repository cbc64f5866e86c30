"""The accounts of a run's lengths: `lengths/RUN/summary.json`, and `fitted/RUN/account.json`. All lengths in tokens."""

from typing import Any

import msgspec

from vlmflow.rows.trained_text import last_answer_only
from vlmflow.swift.description import Description

STEP = 64
"""A recommended max_length is a multiple of it: matrix products are faster with round numbers."""


class NamedRow(msgspec.Struct, frozen=True):
    """One of the longest rows. tokens: all that count against train.max_length, also those of pictures."""

    id: str
    tokens: int
    picture_tokens: int


class SplitLengths(msgspec.Struct, frozen=True):
    """The lengths of some rows: number of rows, sums, the median, the 99th percentile.

    longest: one to `token_counts.NAMED` rows, the longest first. trained_tokens: the sum of those that are trained; 0
    in an account of before.
    """

    rows: int
    tokens: int
    text_tokens: int
    picture_tokens: int
    median: int
    p99: int
    longest: list[NamedRow]
    trained_tokens: int = 0

    @property
    def picture_share(self) -> float:
        """The share of the tokens that pictures take, 0 to 1."""
        return self.picture_tokens / self.tokens


class MaxLengths(msgspec.Struct, frozen=True):
    """Values of train.max_length that fit 99.9 % of the rows of each split, and all rows."""

    covers_most: int = msgspec.field(name="covers_99.9_percent")
    covers_all: int


class MeasuredFiles(msgspec.Struct, frozen=True):
    """SHA-256 by file name: of the rows, of the lengths files, of the model's files that determine lengths."""

    rows: dict[str, str]
    lengths: dict[str, str]
    model: dict[str, str]


class ChatTemplate(msgspec.Struct, frozen=True):
    """How the model's own chat template renders rows, compared token by token with the training.

    rows: the number of compared rows. difference: the first difference in words; null if there is none.
    """

    rows: int
    difference: str | None


class ShownText(msgspec.Struct, frozen=True, omit_defaults=True):
    """A part of a row as the model reads it: whether it is trained, and whether the chat template has added it."""

    text: str
    trained: bool = False
    added: bool = False


class LengthSummary(msgspec.Struct, frozen=True):
    """The result of `measure_lengths` (`lengths/RUN/summary.json`).

    image_max_tokens, text_args: the run's settings at that time. compared_with_ms_swift: the number of rows for which
    ms-swift gave the same length. chat_template: null in an account of before. one_sequence: whether ms-swift's
    template and the model's attention let several rows stand in one sequence without padding; by_template: whether it
    counted all rows, because it gives some of them another length than `chat_form`; both are false in an account of
    before. model_type: the kind of the model, as ms-swift names it; null in an account of before. example: the shortest
    of the compared rows; empty in an account of before. model: what the model says of itself; null in an account of
    before, and if transformers cannot build it.
    """

    train: SplitLengths
    val: SplitLengths
    max_length: MaxLengths
    image_max_tokens: int
    text_args: dict[str, Any]
    compared_with_ms_swift: int
    digests: MeasuredFiles
    chat_template: ChatTemplate | None = None
    one_sequence: bool = False
    by_template: bool = False
    model_type: str | None = None
    example: list[ShownText] = []
    model: Description | None = None

    @property
    def splits(self) -> dict[str, SplitLengths]:
        """Train and val, the splits that a training reads."""
        return {"train": self.train, "val": self.val}


class FittedSplit(msgspec.Struct, frozen=True):
    """The rows of a split before and after: the number before, of shortened and left out ones; the kept rows' lengths.

    rows_in is lengths.rows + left_out + judging. judging: rows of val that are set aside, whatever their length: no
    training chooses its checkpoint by them, and evaluations rest on them (`rows.halves`).
    """

    rows_in: int
    shortened: int
    left_out: int
    lengths: SplitLengths
    judging: int = 0


class FittedRows(msgspec.Struct, frozen=True):
    """The rows of a data set that `fit_rows` kept for a run (`fitted/RUN/account.json`).

    dataset, form, train_on: as in the data set's own account. max_length: no row has more tokens. chat_template,
    one_sequence: as in the lengths' account. digests: SHA-256 by file name, and as "pictures" the one over all pictures
    that the rows name (`image_manifest.pictures_digest`). model: `text_files.text_digests` of the model that the rows
    were measured with; null in an account of before.
    """

    dataset: str
    form: str
    max_length: int
    train: FittedSplit
    val: FittedSplit
    digests: dict[str, str]
    chat_template: ChatTemplate | None = None
    train_on: str = "all"
    one_sequence: bool = False
    model: dict[str, str] | None = None

    @property
    def last_answer_only(self) -> bool:
        """Whether only the last answer of a row is trained."""
        return last_answer_only(self.form, self.train_on)

    @property
    def halved(self) -> bool:
        """Whether a half of val judges: the training was given the other one alone."""
        return self.val.judging > 0

    @property
    def splits(self) -> dict[str, FittedSplit]:
        """The numbers by split."""
        return {"train": self.train, "val": self.val}
