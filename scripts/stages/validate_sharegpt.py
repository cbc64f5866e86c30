"""Check converted rows, hold out val by picture or prompt, and account for every raw row."""

from functools import partial
from pathlib import Path

import msgspec

from vlmflow.config.data_settings import RAW_SPLITS, DatasetSettings
from vlmflow.config.settings import PartOf
from vlmflow.core.account import refuse_other_rows, write_account
from vlmflow.core.files import sha256_of, whole_file
from vlmflow.fetch.placed import refuse_changed_raw
from vlmflow.harness.stage import run_stage
from vlmflow.reports.counts_page import counts_page
from vlmflow.rows.holdout import FindLookAlikes
from vlmflow.rows.stats import EditedFile, Stats, rules_used
from vlmflow.rows.validate import SplitFiles, validate


def main(
    *,
    raw_train: list[Path],
    converted: list[Path],
    rejects: list[Path],
    unread: list[Path],
    stats: Path,
    counts: Path,
    settings: PartOf[DatasetSettings],
    raw_val: list[Path] = [],  # noqa: B006
    raw_test: list[Path] = [],  # noqa: B006
    pictures: list[Path] | None = None,
    fixed_rows: list[Path] = [],  # noqa: B006
    raw_accounts: list[Path] = [],  # noqa: B006
    hashes: list[Path] | None = None,
    threads: int = 1,
) -> None:
    """Validate one data set.

    raw_train, raw_val, raw_test: the files of the raw splits; [] for one without a file.
    converted, rejects, unread: the converter's outputs, one file per raw split: train, then val and test if they exist.
    pictures: the image manifests in the same order; none without pictures, or if they were skipped.
    raw_accounts: the account of each raw file of all splits; [] skips their check. fixed_rows: files of edited rows.
    stats: the account to write; the JSON lines train, val, test and quarantine are written beside it.
    counts: the account as an HTML page, to write.
    settings: those of the data set; max_history_rounds, min_score, single_turn, thoughts, feedback_form and
    skip_images are only for stats.json.
    hashes: the picture hashes of every raw split, if near-duplicates are dropped.
    """
    refuse_changed_raw([*raw_train, *raw_val, *raw_test], raw_accounts)
    raw = {name: files for name, files in zip(RAW_SPLITS, (raw_train, raw_val, raw_test), strict=True) if files}
    manifests: list[Path] | list[None] = pictures or [None] * len(raw)
    for unread_keys, *rows in zip(unread, converted, rejects, strict=True):
        refuse_other_rows(unread_keys, rows)
    outputs = (converted, rejects, manifests, unread)
    files = [SplitFiles(*split) for split in zip(raw, raw.values(), *outputs, strict=True)]
    find_look_alikes = _finder(hashes or [], settings.near_duplicates.picture_distance)
    counted = validate(files, stats.parent, settings, threads, fixed_rows, find_look_alikes)
    account = Stats(
        dataset=stats.parent.name,
        kind=settings.kind,
        modality=settings.modality,
        skip_images=settings.skip_images,
        form=settings.form,
        mended=[EditedFile(str(file), sha256_of(file)) for file in fixed_rows],
        settings=rules_used(settings),
        **msgspec.structs.asdict(counted),
    )
    write_account(stats, account)
    with whole_file(counts, "w") as page:
        page.write(counts_page(account))


def _finder(hashes: list[Path], distance: int) -> FindLookAlikes:
    """Return the function that finds pictures too near to the test split's; without hashes it finds none."""
    if not hashes:
        return lambda test: {}
    from vlmflow.pictures.look_alikes import (
        find_look_alikes,
        read_hashes,  # it imports numpy and Pillow, which nothing else here needs
    )

    return partial(find_look_alikes, read_hashes(hashes), distance=distance)


if __name__ == "__main__":
    run_stage(main, globals().get("snakemake"))
