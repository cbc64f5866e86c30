"""The accounts of a run's lengths, and the rows that fit, for the stages that train. All lengths in tokens.

The accounts are `lengths/RUN/summary.json` and `fitted/RUN/account.json`. They hold for the files of a model that
decide which tokens a conversation becomes.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from vlmflow.core.account import read_account, refuse_other_rows
from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import sha256_of
from vlmflow.rows.sharegpt import last_answer_only
from vlmflow.rows.training_data import TrainingData, with_pictures
from vlmflow.swift.model_layers import Description

TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json")
"""The chat template decides, too: ms-swift's one is found by it, and it holds the date."""


STEP = 64
"""A recommended max_length is a multiple of it: matrix products are faster with round numbers."""

ACCOUNT = "account.json"
"""The account of `fit_rows` in the folder of its rows; the training stages rely on it."""


def text_digests(model: Path) -> dict[str, str]:
    """Return the SHA-256 of those that a model has, by name. model: its folder."""
    return {name: sha256_of(model / name) for name in TEXT_FILES if (model / name).is_file()}


def refuse_other_texts(model: Path, measured: dict[str, str] | None, rows: Path) -> None:
    """Raise VlmflowError if a model is another one than rows were measured with.

    model: its folder. measured: `text_digests` of then; None in an account of before. rows: their folder.
    """
    if measured is None:
        return
    now = text_digests(model)
    for name in sorted(now.keys() | measured.keys()):
        if now.get(name) != measured.get(name):
            raise VlmflowError(
                f"{model / name}: is another file than when the lengths of {rows} were measured",
                "run the same command again: the workflow measures them with the model as it is now",
            )


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
    training chooses its checkpoint by them, and evaluations rest on them (`rows.holdout`).
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


def fitted_data(folder: Path, max_length: int, picture_store: Path, manifests: Sequence[Path] = ()) -> TrainingData:
    """Return the rows that `fit_rows` wrote to `fitted/RUN`, each of at most `max_length` tokens.

    picture_store: the folder of all stores. manifests: the image manifests of the rows' pictures; none if rows have no
    pictures.

    Raises VlmflowError if rows or pictures have changed, a picture is missing, or rows were fitted to more tokens.
    """
    account = fitted_rows(folder)
    if account.max_length > max_length:
        raise VlmflowError(
            f"{folder}: these rows were fitted to {account.max_length} tokens, the run's max_length is {max_length}",
            f"fit them again: snakemake --forcerun fit_rows -- {folder}",
        )
    refuse_other_rows(folder / ACCOUNT)
    store = picture_store / account.dataset
    files = folder / "train.jsonl", folder / "val.jsonl"
    data = with_pictures(*files, folder / ACCOUNT, account.last_answer_only, account.digests, store, manifests)
    return replace(data, one_sequence=account.one_sequence)


def pictures_of(folder: Path, picture_store: Path) -> Path:
    """Return the picture store of the rows in `folder` (fitted/RUN), in the folder of all stores."""
    return picture_store / fitted_rows(folder).dataset


def fitted_rows(folder: Path) -> FittedRows:
    """Read the account of the rows in `folder` (fitted/RUN)."""
    return read_account(folder / ACCOUNT, FittedRows)
