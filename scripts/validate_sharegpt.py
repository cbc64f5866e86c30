"""Check converted rows, hold out val by picture, and account for every raw row."""

from dataclasses import asdict
from functools import partial
from pathlib import Path

from harness.stage import run_stage
from vlmflow.config.row_settings import RowLimits
from vlmflow.core.files import sha256_of, whole_file, write_json
from vlmflow.core.integrity import refuse_other_rows
from vlmflow.fetch.from_disk import refuse_changed_raw
from vlmflow.pictures.hash_table import read_hashes
from vlmflow.pictures.look_alikes import near_pictures
from vlmflow.reports.counts_page import counts_page
from vlmflow.rows.validate import SplitFiles, SplitRules, validate

RULES_OF_KIND = ("modality", "whole_rows", "drop_near_questions")
"""What stands elsewhere in stats.json."""


def main(
    *,
    raw_train: list[Path],
    converted: list[Path],
    rejects: list[Path],
    unread: list[Path],
    stats: Path,
    counts: Path,
    form: str,
    max_history_rounds: int | None,
    val_share: float,
    seed: int,
    max_reject_share: float,
    row_limits: RowLimits,
    raw_test: list[Path] = [],  # noqa: B006
    pictures: list[Path] | None = None,
    mended: list[Path] = [],  # noqa: B006
    raw_accounts: list[Path] = [],  # noqa: B006
    test_share: float = 0.0,
    kind: str = "fire",
    one_prompt: bool = False,
    modality: str = "image",
    skip_images: bool = False,
    hashes: list[Path] | None = None,
    picture_distance: int = 0,
    drop_near_duplicates: bool = False,
    read_columns: list[str] | None = None,
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
    form, max_history_rounds, skip_images: how the rows were made, for stats.json.
    kind, modality, val_share, test_share, seed, max_reject_share, row_limits: see docs/config.md.
    one_prompt: all rows have the same prompt: without a picture, they are told apart by prompt and answer.
    drop_near_duplicates: leave near-duplicates of the test split out. Of pictures: hashes, those of every raw split,
    and picture_distance, how near they are.
    read_columns: those that are read where the raw rows are parquet; null for all.
    """
    refuse_changed_raw([*raw_train, *raw_test], raw_accounts)
    raw = [files for files in (raw_train, raw_test) if files]
    manifests = pictures or [None] * len(raw)
    for account, *rows in zip(unread, converted, rejects, strict=True):
        refuse_other_rows(account, rows)
    outputs = (converted, rejects, manifests, unread)
    files = [SplitFiles(*split) for split in zip(("train", "test"), raw, *outputs, strict=False)]
    shares = (val_share, seed, max_reject_share, row_limits, test_share)
    rules = SplitRules(*shares, modality, whole_rows=one_prompt, drop_near_questions=drop_near_duplicates)
    near_test = partial(near_pictures, read_hashes(hashes or []), distance=picture_distance)
    account = validate(files, stats.parent, rules, threads, mended, near_test, read_columns)
    settings = {
        "max_history_rounds": max_history_rounds,
        **{key: value for key, value in asdict(rules).items() if key not in RULES_OF_KIND},
        "row_limits": row_limits.model_dump(),
        **({"near_duplicates": {"picture_distance": picture_distance, "drop": True}} if drop_near_duplicates else {}),
    }
    what = {"kind": kind, "modality": modality, "skip_images": skip_images, "form": form}
    what["mended"] = [{"file": str(file), "sha256": sha256_of(file)} for file in mended]
    account = {"dataset": stats.parent.name, **what, "settings": settings, **account}
    write_json(stats, account)
    with whole_file(counts, "w") as page:
        page.write(counts_page(account))


if __name__ == "__main__":
    run_stage(main, globals().get("snakemake"))
