"""The link from a run's rows to their pictures: an image manifest names each picture of the rows, and its digest."""

from pathlib import Path

from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import lies_within
from vlmflow.lengths.fitted import ACCOUNT, fitted_rows
from vlmflow.pictures.image_manifest import pictures_digest
from vlmflow.pictures.store import digest_in_store
from vlmflow.reports.link import Difference, Link, compared
from vlmflow.rows.training_data import entries_named, pictures_in

NAME = "pictures of these rows"


def pictures_link(directory: Path, rows: Path, dataset: str, of_rows: Link) -> Link:
    """Compare the pictures of a run's rows with the image manifests, and this with the account of the rows.

    directory: the working directory. rows: those that fit (fitted/RUN). dataset: its name. of_rows: the link of these
    rows; only rows that are as recorded are read.

    Raises PassingError if a picture cannot be read.
    """
    if not of_rows.whole:
        return Link(NAME, "not looked for, because the rows that fit are not all here or differ", False)
    images, store = directory / "images" / dataset, directory / "stores" / "pictures" / dataset
    manifests = [file for file in (images / "train.jsonl", images / "val.jsonl") if file.is_file()]
    recorded = fitted_rows(rows).digests.get("pictures", "")
    try:
        names = pictures_in(rows / "train.jsonl", rows / "val.jsonl")
        if not names:
            return Link(NAME, "they have none", True)
        if not manifests:
            return Link(NAME, str(images / "train.jsonl"), False)
        entries = entries_named({name for name in names if lies_within(name)}, manifests)
        found = pictures_digest(entries)
    except VlmflowError as error:  # a manifest that is damaged, or another version's
        return Link(NAME, "", True, [Difference(str(images), recorded, error.cause)])
    except ValueError as error:  # rows of another version
        return Link(NAME, "", True, [Difference(str(rows), recorded, str(error))])
    if found != recorded:
        return Link(NAME, "", True, [Difference(f"{images} ({rows / ACCOUNT})", recorded, found)])
    return compared(NAME, store, {name: digest_in_store(store, entry) for name, entry in entries.items()})
