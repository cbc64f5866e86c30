"""Write the page of a data set's content, its lost rows, and the reasons."""

from itertools import chain
from pathlib import Path

from vlmflow.config.settings import NearDuplicates, PictureLimits
from vlmflow.core.account import refuse_other_rows
from vlmflow.core.files import write_text
from vlmflow.harness.stage import run_stage
from vlmflow.pictures.manifest import read_picture_manifest
from vlmflow.pictures.store import refuse_changed_pictures
from vlmflow.reports.data_page import data_page


def main(
    *,
    stats: Path,
    page: Path,
    picture_store: Path,
    picture_limits: PictureLimits,
    near_duplicates: NearDuplicates,
    pictures: list[Path] | None = None,
    good_run: str | None = None,
) -> None:
    """Write the page.

    stats: the data set's account; its rows, its quarantine and its near-duplicates are in the same folder.
    pictures: the image manifest of every raw split, named after the split; none if no pictures were checked.
    page: the HTML file to write. picture_store: the folder with all picture stores.
    picture_limits, near_duplicates: those with which its pictures were checked and near-duplicates were searched.
    good_run: a run that trains only good attempts of the same data.
    """
    manifests = {file.stem: file for file in pictures or []}
    store = picture_store / stats.parent.name
    refuse_other_rows(stats)
    shown = chain.from_iterable(map(read_picture_manifest, manifests.values()))
    refuse_changed_pictures(store, (entry for entry in shown if entry.reason is None))
    html = data_page(stats.parent, manifests, store, picture_limits, near_duplicates, good_run)
    write_text(page, html)


if __name__ == "__main__":
    run_stage(main, globals().get("snakemake"))
