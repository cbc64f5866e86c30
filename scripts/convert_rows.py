"""Turn raw rows of any kind but fire into ShareGPT rows."""

from pathlib import Path

from harness.stage import run_stage
from vlmflow.config.row_settings import RowChoice
from vlmflow.core.files import write_json
from vlmflow.fetch.from_disk import refuse_changed_raw
from vlmflow.raw.split import open_rows
from vlmflow.rows.convert import convert
from vlmflow.rows.form_rows import form_rows, refuse_columns


def main(
    *,
    raw: list[Path],
    converted: Path,
    rejects: Path,
    unread: Path,
    split: str,
    kind: str,
    modality: str,
    columns: dict[str, str] | None = None,
    prompt: str | None = None,
    system_prompt: str | None = None,
    ignore_keys: list[str] = [],  # noqa: B006
    choice: RowChoice | None = None,
    mended: list[Path] = [],  # noqa: B006
    raw_accounts: list[Path] = [],  # noqa: B006
    threads: int = 1,
) -> None:
    """Convert one split.

    raw: the split's files, each a JSON array, JSON lines, CSV or parquet.
    converted: JSON lines to write, one training row each.
    rejects: JSON lines to write, one for each raw row that cannot be used or is left out.
    unread: the account of what of the rows was not read, to write, with the digests of the other two.
    split: train or test.
    kind, modality, columns, prompt, system_prompt, ignore_keys: see docs/config.md.
    choice: which rows are used. mended: files of edited rows. raw_accounts: what was fetched, file by file.
    """
    refuse_changed_raw(raw, raw_accounts)
    make = form_rows(kind, modality, columns or {}, prompt, system_prompt, ignore_keys)
    choice = choice or RowChoice()
    with open_rows(raw, split, mended, choice.read_columns) as rows:
        refuse_columns(rows, kind, modality, columns or {})
        found = convert(rows, converted, rejects, split, make, choice, threads)
    write_json(unread, found)


if __name__ == "__main__":
    run_stage(main, globals().get("snakemake"))
