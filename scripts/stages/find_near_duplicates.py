"""Find the near-duplicates between the train and the test split of a data set."""

from pathlib import Path

from vlmflow.core.account import refuse_other_rows
from vlmflow.core.errors import log
from vlmflow.harness.stage import run_stage
from vlmflow.rows.near_duplicates import find_near_duplicates


def main(
    *,
    test_rows: Path,
    train_rows: Path,
    stats: Path,
    unread: Path,
    pairs: Path,
    picture_distance: int,
    one_prompt: bool,
    pictures: list[Path] | None = None,
    hashes: list[Path] | None = None,
) -> None:
    """Write the near-duplicates.

    test_rows: the validated rows of the test split. train_rows: the converted rows of the raw train split.
    stats, unread: the accounts with their digests.
    pictures: the image manifests of the raw splits, train first. hashes: their picture hashes. None without pictures.
    pairs: JSON lines to write. picture_distance: bits in which near-duplicates may differ.
    one_prompt: all rows have the same prompt: without a picture, they are compared by prompt and answer.
    """
    refuse_other_rows(stats, [test_rows])
    refuse_other_rows(unread, [train_rows])
    manifests, known = pictures or [], hashes or []
    counts = find_near_duplicates(train_rows, test_rows, manifests, known, picture_distance, pairs, one_prompt)
    log.info("near-duplicates of the test split: %d pictures, %d rows without a picture", counts.pictures, counts.rows)


if __name__ == "__main__":
    run_stage(main, globals().get("snakemake"))
