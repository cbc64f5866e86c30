"""What a training reads: validated rows, and the pictures that they name."""

from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from vlmflow.errors import VlmflowError
from vlmflow.files import read_json, sha256_of

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


class _Images(msgspec.Struct):
    images: list[str]


def validated_data(train: Path, val: Path, stats: Path, picture_store: Path) -> TrainingData:
    """Give a data set that passed validation, and is still what passed.

    stats: the account that `validate_sharegpt` wrote beside the rows. picture_store: the folder of all stores.

    Raises VlmflowError where the rows changed since, or a picture is gone from the store.
    """
    account = read_json(stats)
    digests = account["digests"]
    for rows in (train, val):
        if sha256_of(rows) != digests[rows.name]:
            raise VlmflowError(
                f"{rows}: these are not the rows that {stats} vouches for",
                f"remove {rows} and run the same command again: it is validated anew",
            )
    pictures = picture_store / account["dataset"]
    _refuse_missing_pictures([train, val], pictures)
    digest = digests[train.name] + digests[val.name] + digests["pictures"]
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
