"""Write the page of the tokens of a run's rows, and the max_length that they need."""

from pathlib import Path

from vlmflow.core.account import refuse_other_rows
from vlmflow.core.files import write_text
from vlmflow.harness.stage import run_stage
from vlmflow.reports.planning_pages import lengths_page


def main(
    *, train: Path, val: Path, summary: Path, train_rows: Path, val_rows: Path, page: Path, max_length: int
) -> None:
    """Write the page.

    train, val, summary: the files of measure_lengths (lengths/RUN). train_rows, val_rows: the rows that it measured.
    page: the HTML file to write. max_length: the run's own, see docs/config.md.
    """
    lengths, rows = {"train": train, "val": val}, {"train": train_rows, "val": val_rows}
    again = f"measure them again: snakemake --forcerun measure_lengths -- {summary}"
    refuse_other_rows(summary, list(lengths.values()), "lengths", again)
    refuse_other_rows(summary, list(rows.values()), "rows", again)
    html = lengths_page(summary.parent.name, lengths, rows, summary, max_length)
    write_text(page, html)


if __name__ == "__main__":
    run_stage(main, globals().get("snakemake"))
