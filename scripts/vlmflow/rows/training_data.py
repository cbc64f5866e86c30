"""The input of a training: validated rows and their pictures."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

import msgspec

from vlmflow.core.account import read_account, read_lines, refuse_other_rows
from vlmflow.core.errors import VlmflowError
from vlmflow.pictures.manifest import KnownPicture, pictures_digest
from vlmflow.pictures.store import refuse_changed_pictures
from vlmflow.rows.sharegpt import ShareGptRow, loss_scale
from vlmflow.rows.stats import Stats


@dataclass(frozen=True)
class TrainingData:
    """The rows and pictures of a training.

    train, val: JSON lines of ShareGPT rows. pictures: the data set's picture store; names in rows are relative to it.
    digest: identifies rows and pictures: their SHA-256 digests in hexadecimal, joined.
    last_answer_only: only a row's last answer is trained. manifests: the pictures' image manifests.
    one_sequence: whether several rows may stand in one sequence (`FittedRows.one_sequence`).
    """

    train: Path
    val: Path
    pictures: Path
    digest: str
    last_answer_only: bool
    manifests: tuple[Path, ...] = ()
    one_sequence: bool = False

    def lengths(self, split: str) -> Path:
        """Return the file with the lengths of the rows of `train` or `val`, beside them."""
        return getattr(self, split).with_suffix(".lengths.jsonl")  # type: ignore[no-any-return]

    @property
    def loss_scale(self) -> str:
        """The value of ms-swift's `loss_scale` that selects the trained answers."""
        return loss_scale(self.last_answer_only)


class _Images(msgspec.Struct):
    images: list[str]


def validated_data(
    train: Path, val: Path, stats: Path, picture_store: Path, manifests: Sequence[Path] = ()
) -> TrainingData:
    """Return a validated data set, after a check that it has not changed.

    stats: the account that `validate_sharegpt` wrote beside the rows.
    picture_store: the folder with the stores of all data sets.
    manifests: the image manifests of the rows' pictures; none if rows have no pictures.

    Raises VlmflowError if rows or pictures have changed, a picture is missing, or the pictures were never checked.
    """
    account = read_account(stats, Stats)
    if account.skip_images:
        raise VlmflowError(
            f"{stats}: skip_images is set: this data set's pictures were never checked, so no run can train on it",
            f"remove datasets.{account.dataset}.skip_images, and run the same command again",
        )
    refuse_other_rows(stats, [train, val])
    store = picture_store / account.dataset
    return with_pictures(train, val, stats, account.last_answer_only, account.digests, store, manifests)


def with_pictures(
    train: Path,
    val: Path,
    account: Path,
    last_answer_only: bool,
    digests: Mapping[str, str],
    pictures: Path,
    manifests: Sequence[Path],
) -> TrainingData:
    """Return rows with their pictures, after a check that no picture has changed; the caller has checked the rows.

    account: the file that records `digests`: SHA-256 by file name, and under "pictures" one over all
    pictures (`pictures_digest`). pictures: the data set's store.

    Raises VlmflowError if a picture has changed or is missing.
    """
    entries = entries_named(pictures_in(train, val), manifests)
    if pictures_digest(entries) != digests["pictures"]:
        raise VlmflowError(
            f"{', '.join(map(str, manifests)) or pictures}: {account} records other digests for these pictures",
            f"check them again: vlmflow refresh-pictures FILE {pictures.name}",
        )
    refuse_changed_pictures(pictures, entries.values())
    digest = "".join(digests[name] for name in (train.name, val.name, "pictures"))
    return TrainingData(train, val, pictures, digest, last_answer_only, tuple(manifests))


def pictures_in(*files: Path) -> set[str]:
    """Return the names of all pictures in the rows of some files."""
    return {name for file in files for row in read_lines(file, _Images) for name in row.images}


def entries_named(names: set[str], manifests: Iterable[Path]) -> dict[str, KnownPicture]:
    """Return the manifests' entries of some pictures, by their names in the store; unknown names are left out."""
    entries = chain.from_iterable(read_lines(manifest, KnownPicture) for manifest in manifests)
    return {entry.name: entry for entry in entries if entry.name in names}


def first_rows(rows: Path, count: int) -> list[ShareGptRow]:
    """Return the first `count` rows of a data file."""
    return list(islice(read_lines(rows, ShareGptRow), count))
