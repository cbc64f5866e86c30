"""Check converted rows, hold out val by picture, and account for every raw row."""

from functools import partial
from pathlib import Path

import msgspec

from harness.stage import run_stage
from vlmflow.config.row_settings import NearDuplicates, RowLimits
from vlmflow.config.settings import Settings
from vlmflow.core.account import write_account
from vlmflow.core.files import sha256_of, whole_file
from vlmflow.core.integrity import refuse_other_rows
from vlmflow.fetch.from_disk import refuse_changed_raw
from vlmflow.reports.counts_page import counts_page
from vlmflow.rows.stats import EditedFile, RulesUsed, Stats
from vlmflow.rows.validate import FindLookAlikes, SplitFiles, SplitRules, validate


class DatasetBlock(Settings):
    """What this stage takes of a data set's settings; see docs/config.md."""

    kind: str
    one_prompt: bool
    """All rows have the same prompt: without a picture, they are told apart by prompt and answer."""

    form: str
    max_history_rounds: int | None
    modality: str
    skip_images: bool
    test_share: float
    val_share: float
    seed: int
    max_reject_share: float
    row_limits: RowLimits
    near_duplicates: NearDuplicates
    """Whether those of the test split are left out, and then how near pictures are."""

    read_columns: list[str] | None = None
    """Those that are read where the raw rows are parquet; null for all."""


def main(
    *,
    raw_train: list[Path],
    converted: list[Path],
    rejects: list[Path],
    unread: list[Path],
    stats: Path,
    counts: Path,
    settings: DatasetBlock,
    raw_test: list[Path] = [],  # noqa: B006
    pictures: list[Path] | None = None,
    mended: list[Path] = [],  # noqa: B006
    raw_accounts: list[Path] = [],  # noqa: B006
    hashes: list[Path] | None = None,
    threads: int = 1,
) -> None:
    """Validate one data set.

    raw_train, raw_test: the files of the raw splits; none of test where it has no file of its own.
    converted, rejects: per raw split (train first, then test where there is one) the converter's first two outputs.
    unread: likewise the third: which keys nobody read.
    pictures: likewise the image manifests; none without pictures, or where they were skipped.
    raw_accounts: what was fetched, file by file, of both. mended: files of edited rows.
    stats: the account to write; train, val, test and quarantine JSON lines are written beside it.
    counts: the account as an HTML page, to write.
    settings: the data set's; form, max_history_rounds and skip_images only for stats.json.
    hashes: of the pictures of every raw split, where near-duplicates are left out.
    """
    refuse_changed_raw([*raw_train, *raw_test], raw_accounts)
    raw = [files for files in (raw_train, raw_test) if files]
    manifests: list[Path] | list[None] = pictures or [None] * len(raw)
    for unread_keys, *rows in zip(unread, converted, rejects, strict=True):
        refuse_other_rows(unread_keys, rows)
    outputs = (converted, rejects, manifests, unread)
    files = [SplitFiles(*split) for split in zip(("train", "test"), raw, *outputs, strict=False)]
    rules = SplitRules(
        settings.val_share,
        settings.seed,
        settings.max_reject_share,
        settings.row_limits,
        settings.test_share,
        settings.modality,
        one_prompt=settings.one_prompt,
        drop_near_questions=settings.near_duplicates.drop,
    )
    find_look_alikes = _finder(hashes or [], settings.near_duplicates.picture_distance)
    counted = validate(files, stats.parent, rules, threads, mended, find_look_alikes, settings.read_columns)
    account = Stats(
        dataset=stats.parent.name,
        kind=settings.kind,
        modality=settings.modality,
        skip_images=settings.skip_images,
        form=settings.form,
        mended=[EditedFile(str(file), sha256_of(file)) for file in mended],
        settings=_rules_used(settings),
        **msgspec.structs.asdict(counted),
    )
    write_account(stats, account)
    with whole_file(counts, "w") as page:
        page.write(counts_page(account))


def _rules_used(settings: DatasetBlock) -> RulesUsed:
    near_duplicates = settings.near_duplicates
    return RulesUsed(
        max_history_rounds=settings.max_history_rounds,
        val_share=settings.val_share,
        seed=settings.seed,
        max_reject_share=settings.max_reject_share,
        row_limits=settings.row_limits.model_dump(),
        test_share=settings.test_share,
        near_duplicates=near_duplicates.model_dump() if near_duplicates.drop else None,
    )


def _finder(hashes: list[Path], distance: int) -> FindLookAlikes:
    """Give what says which pictures are too near to the test split's; without hashes none are."""
    if not hashes:
        return lambda test: {}
    from vlmflow.pictures.hash_table import read_hashes  # with numpy and Pillow, which nothing else here needs
    from vlmflow.pictures.look_alikes import find_look_alikes

    return partial(find_look_alikes, read_hashes(hashes), distance=distance)


if __name__ == "__main__":
    run_stage(main, globals().get("snakemake"))
