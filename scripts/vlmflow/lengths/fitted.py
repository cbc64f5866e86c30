"""Reads the rows of a run that fit from `fitted/RUN`, for the training stages."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from vlmflow.core.account import read_account
from vlmflow.core.errors import VlmflowError
from vlmflow.core.integrity import refuse_other_rows
from vlmflow.lengths.accounts import FittedRows
from vlmflow.rows.training_data import TrainingData, with_pictures

ACCOUNT = "account.json"
"""The account of `fit_rows` in the folder of its rows; the training stages rely on it."""


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
