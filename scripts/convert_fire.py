"""Turn raw FIRE rows into ShareGPT rows, in the trajectory or the timestep form."""

from pathlib import Path

from harness.stage import run_stage
from vlmflow.config.row_settings import RowChoice, RowLimits
from vlmflow.config.settings import Settings
from vlmflow.core.account import write_account
from vlmflow.fetch.from_disk import refuse_changed_raw
from vlmflow.raw.split import open_rows
from vlmflow.rows.convert import convert
from vlmflow.rows.fire_rows import TrainingForm, fire_rows


class DatasetBlock(Settings):
    """The data set's settings that this stage uses; see docs/config.md."""

    form: str
    max_history_rounds: int | None
    row_limits: RowLimits
    system_prompt: str | None = None
    min_score: int | None = None
    single_turn: str | None = None
    thoughts: str = "keep"
    feedback_form: str = "raw"
    ignore_keys: list[str] = []


def main(
    *,
    raw: list[Path],
    converted: Path,
    rejects: Path,
    unread: Path,
    split: str,
    settings: DatasetBlock,
    choice: RowChoice | None = None,
    mended: list[Path] = [],  # noqa: B006
    raw_accounts: list[Path] = [],  # noqa: B006
    threads: int = 1,
) -> None:
    """Convert one split.

    raw: the split's files, each a JSON array as FIRE publishes it.
    converted: JSON lines to write, one training row each.
    rejects: JSON lines to write, one for each raw row that is unusable or left out.
    unread: the account of unread keys to write, with the digests of the other two files.
    split: train or test.
    settings: those of the data set. choice: which rows are used. mended: files of edited rows.
    raw_accounts: the account of each raw file; [] skips their check.
    """
    refuse_changed_raw(raw, raw_accounts)
    form = TrainingForm(**{name: getattr(settings, name) for name in TrainingForm.__dataclass_fields__})
    make = fire_rows(form, settings.row_limits, settings.system_prompt, settings.ignore_keys)
    with open_rows(raw, split, mended) as rows:
        found = convert(rows, converted, rejects, split, make, choice or RowChoice(), threads)
    write_account(unread, found)


if __name__ == "__main__":
    run_stage(main, globals().get("snakemake"))
