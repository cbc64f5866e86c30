"""Write the page of a run's evaluation."""

from itertools import chain
from pathlib import Path

from vlmflow.config.settings import PictureLimits
from vlmflow.core.account import refuse_other_rows
from vlmflow.core.files import write_text
from vlmflow.harness.stage import run_stage
from vlmflow.pictures.manifest import read_picture_manifest
from vlmflow.pictures.store import refuse_changed_pictures
from vlmflow.reports.eval_page import eval_page


def main(
    *,
    evaluated: list[Path],
    rows: list[Path],
    stats: Path,
    page: Path,
    picture_limits: PictureLimits,
    picture_store: Path,
    answered: list[Path] | None = None,
    pictures: list[Path] | None = None,
) -> None:
    """Write the page.

    evaluated: the folders eval/RUN/SPLIT. rows: the data set's files of these splits. stats: its account.
    answered: the folders answers/RUN/SPLIT; none if the models were not asked.
    page: the HTML file to write. picture_limits: those with which its pictures were checked.
    picture_store: the folder with all picture stores. pictures: the image manifests; none if rows have no pictures.
    """
    store = picture_store / stats.parent.name
    refuse_other_rows(stats, rows)
    shown = chain.from_iterable(map(read_picture_manifest, pictures or []))
    refuse_changed_pictures(store, (entry for entry in shown if entry.reason is None))
    files = {file.stem: file for file in rows}
    answers = {folder.name: folder for folder in answered or []}
    html = eval_page(evaluated, files, answers, store, picture_limits, bool(pictures))
    write_text(page, html)


if __name__ == "__main__":
    run_stage(main, globals().get("snakemake"))
