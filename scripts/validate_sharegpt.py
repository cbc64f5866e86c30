"""Check converted rows, hold out val by picture, and account for every raw row."""

from dataclasses import asdict
from pathlib import Path

from harness.stage import run_stage
from vlmflow.config.data_settings import RowLimits
from vlmflow.files import whole_file, write_json
from vlmflow.reports.pages import counts_page
from vlmflow.rows.validate import SplitFiles, SplitRules, validate


def main(
    *,
    raw: list[Path],
    converted: list[Path],
    rejects: list[Path],
    pictures: list[Path],
    stats: Path,
    counts: Path,
    form: str,
    max_history_rounds: int | None,
    val_share: float,
    seed: int,
    max_reject_share: float,
    row_limits: RowLimits,
    threads: int = 1,
) -> None:
    """Validate one data set.

    raw, converted, rejects, pictures: per raw split (train first, then test where there is one) the raw file,
    the converter's two outputs and the image manifest.
    stats: the account to write; train, val, test and quarantine JSON lines are written beside it.
    counts: the account as an HTML page, to write.
    form, max_history_rounds: how the rows were made, for stats.json.
    val_share, seed, max_reject_share, row_limits: see docs/config.md.
    """
    files = [SplitFiles(*split) for split in zip(("train", "test"), raw, converted, rejects, pictures, strict=False)]
    rules = SplitRules(val_share, seed, max_reject_share, row_limits)
    account = validate(files, stats.parent, rules, threads)
    settings = {
        "max_history_rounds": max_history_rounds,
        **asdict(rules),
        "row_limits": row_limits.model_dump(),
    }
    account = {"dataset": stats.parent.name, "form": form, "settings": settings, **account}
    write_json(stats, account)
    with whole_file(counts, "w") as page:
        page.write(counts_page(account))


if __name__ == "__main__":
    run_stage(main, globals().get("snakemake"))
