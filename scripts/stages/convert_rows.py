"""Turn raw rows into ShareGPT rows."""

from pathlib import Path

from vlmflow.config.data_settings import DatasetSettings
from vlmflow.config.raw_forms import form_of
from vlmflow.config.settings import PartOf, RowChoice
from vlmflow.core.account import write_account
from vlmflow.core.errors import log
from vlmflow.fetch.placed import refuse_changed_raw
from vlmflow.harness.stage import run_stage
from vlmflow.raw.choice import refuse_columns
from vlmflow.raw.found_kind import found_kind, of_kind, unread_pictures
from vlmflow.raw.split import open_rows
from vlmflow.rows.convert import convert
from vlmflow.rows.form_rows import form_rows
from vlmflow.rows.unread import refuse_unread_texts


def main(
    *,
    raw: list[Path],
    converted: Path,
    rejects: Path,
    unread: Path,
    split: str,
    settings: PartOf[DatasetSettings],
    choice: RowChoice | None = None,
    fixed_rows: list[Path] = [],  # noqa: B006
    raw_accounts: list[Path] = [],  # noqa: B006
    threads: int = 1,
) -> None:
    """Convert one split.

    raw: the split's files, each a JSON array, JSON lines, CSV or parquet.
    converted: JSON lines to write, one training row each.
    rejects: JSON lines to write, one for each raw row that is unusable or left out.
    unread: the account of unread keys to write, with the digests of the other two files.
    split: train, val or test.
    settings: those of the data set. choice: which rows are used. fixed_rows: files of edited rows.
    raw_accounts: the account of each raw file; [] skips their check.
    """
    refuse_changed_raw(raw, raw_accounts)
    modality, columns = settings.modality, settings.columns
    choice = choice or RowChoice()
    with open_rows(raw, split, fixed_rows, choice.read_columns) as rows:
        kind, why = found_kind(settings.kind, rows, columns, choice.take)
        if why:
            log.info("%s: kind auto finds %s", rows, why)
        make = form_rows(kind, settings, choice.take, choice.frames)
        refuse_columns(rows, kind, modality, columns, choice.take)
        choice = of_kind(choice, kind)
        if modality != "text":
            for key, advice in unread_pictures(rows, kind, columns, choice).items():
                log.warning("%s: rows without a picture have some under %r, which is not read: %s", rows, key, advice)
        if not form_of(kind).fixed:
            refuse_unread_texts(rows, form_rows(kind, settings, choice.take, choice.frames), converted.parent.name, why)
        account = convert(rows, converted, rejects, split, make, choice, threads, why)
    write_account(unread, account)


if __name__ == "__main__":
    run_stage(main, globals().get("snakemake"))
