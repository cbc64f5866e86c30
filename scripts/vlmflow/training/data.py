"""What a training reads: validated rows, and the pictures that they name."""

from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from vlmflow.errors import VlmflowError
from vlmflow.files import read_json, sha256_of

ACCOUNT = "account.json"
"""What `fit_rows` says of its rows, in their folder; the training stages rely on it."""

PICTURES_NAMED = 5
"""Missing pictures that an error names."""


@dataclass(frozen=True)
class TrainingData:
    """What is trained on.

    train, val: JSON lines of ShareGPT rows. pictures: the store that the rows' picture names are relative to.
    digest: SHA-256 over rows and pictures. last_answer_only: train no answer but the last (timestep form).
    """

    train: Path
    val: Path
    pictures: Path
    digest: str
    last_answer_only: bool

    @property
    def loss_scale(self) -> str:
        """Which answers are trained, in ms-swift's words."""
        return "last_round" if self.last_answer_only else "default"


class _Images(msgspec.Struct):
    images: list[str]


def validated_data(train: Path, val: Path, stats: Path, picture_store: Path) -> TrainingData:
    """Give a data set that passed validation, and is still what passed.

    stats: the account that `validate_sharegpt` wrote beside the rows. picture_store: the folder of all stores.

    Raises VlmflowError where the rows changed since, a picture is gone from the store, or nobody looked at the
    pictures.
    """
    account = read_json(stats)
    if account["skip_images"]:
        raise VlmflowError(
            f"{stats}: skip_images: the pictures of this data set were never looked at; it is for its texts alone",
            f"remove datasets.{account['dataset']}.skip_images, and run the same command again",
        )
    for rows in (train, val):
        _refuse_others(rows, account["digests"], stats, remedy=f"remove {rows}")
    return _checked(train, val, account, picture_store)


def fitted_data(folder: Path, max_length: int, picture_store: Path) -> TrainingData:
    """Give the rows that `fit_rows` left in `fitted/RUN`, each of at most `max_length` tokens.

    Raises VlmflowError where they changed since, were fitted to more tokens, or a picture is gone from the store.
    """
    account = read_json(folder / ACCOUNT)
    if account["max_length"] > max_length:
        raise VlmflowError(
            f"{folder}: these rows were fitted to {account['max_length']} tokens, the run has {max_length}",
            f"fit them again: snakemake {folder}",
        )
    train, val = folder / "train.jsonl", folder / "val.jsonl"
    for rows in (train, val):
        _refuse_others(rows, account["digests"], folder / ACCOUNT, remedy=f"remove {folder}")
    return _checked(train, val, account, picture_store)


def pictures_of(fitted: Path, picture_store: Path) -> Path:
    """Give the picture store of the rows in `fitted` (fitted/RUN), in the folder of all stores."""
    return picture_store / read_json(fitted / ACCOUNT)["dataset"]


def _refuse_others(rows: Path, digests: dict[str, str], account: Path, remedy: str) -> None:
    if sha256_of(rows) != digests[rows.name]:
        raise VlmflowError(
            f"{rows}: these are not the rows that {account} vouches for",
            f"{remedy} and run the same command again: it is made anew",
        )


def _checked(train: Path, val: Path, account: dict[str, Any], picture_store: Path) -> TrainingData:
    pictures = picture_store / account["dataset"]
    _refuse_missing_pictures([train, val], pictures)
    digest = "".join(account["digests"][name] for name in (train.name, val.name, "pictures"))
    return TrainingData(train, val, pictures, digest, account["form"] == "timestep")


def _refuse_missing_pictures(files: list[Path], pictures: Path) -> None:
    decoder = msgspec.json.Decoder(_Images)
    names: set[str] = set()
    for file in files:
        with file.open("rb") as lines:
            for line in lines:
                names.update(decoder.decode(line).images)
    missing = sorted(name for name in names if not (pictures / name).exists())
    if missing:
        raise VlmflowError(
            f"{pictures}: {len(missing)} of {len(names)} pictures are gone: {', '.join(missing[:PICTURES_NAMED])}",
            f"put them back, or resolve them anew: make refresh-pictures DATASET={pictures.name} (see README.md)",
        )


def first_rows(rows: Path, count: int) -> list[dict[str, Any]]:
    """Give the first `count` rows of a data file, as plain JSON values."""
    with rows.open("rb") as lines:
        return [msgspec.json.decode(line) for line in islice(lines, count)]
