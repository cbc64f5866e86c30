"""Fetch the pictures that the rows of a split name and no picture root has."""

from pathlib import Path

from vlmflow.config.settings import RowChoice
from vlmflow.config.tables import PICTURE_SOURCES, PINS, PictureSource, read_pins, read_sources
from vlmflow.core.account import write_account
from vlmflow.fetch.fetch_pictures import PictureFetch
from vlmflow.fetch.placed import refuse_changed_raw
from vlmflow.harness.stage import run_stage
from vlmflow.pictures.resolve import named_paths
from vlmflow.pictures.roots import PictureRoots
from vlmflow.raw.named import EMBEDDED


def main(
    *,
    raw: list[Path],
    account: Path,
    dataset: str,
    image_roots: list[str],
    max_bytes: int,
    store: Path,
    sources: dict[str, PictureSource],
    choice: RowChoice | None = None,
    fixed_rows: list[Path] = [],  # noqa: B006
    raw_accounts: list[Path] = [],  # noqa: B006
    table: Path = PICTURE_SOURCES,
    pins: Path = PINS,
) -> None:
    """Fetch the pictures of one split.

    raw: the files of the split's raw rows.
    account: the JSON file to write: for every source the pictures had, fetched and missing, and the bytes.
    dataset: the data set's name in the configuration.
    image_roots: folders that may already have pictures. max_bytes: of one picture.
    store: the folder to fetch into, under the paths that the rows name; it serves as another root.
    sources: the configuration's own sources, which take precedence over the table.
    choice: which rows are used. fixed_rows: files of edited rows. raw_accounts: the account of each raw file; [] skips
    their check.
    table: the table of known sources.
    pins: the table with revision, size and sha256 of every archive on the hub.
    """
    refuse_changed_raw(raw, raw_accounts)
    store.mkdir(parents=True, exist_ok=True)
    picture_roots = PictureRoots([*image_roots, str(store)], f"datasets.{dataset}.image_roots")
    split = account.name.partition(".")[0]
    label = f"fetch_images {dataset}/{split}"
    fetch = PictureFetch(read_sources(sources, table), read_pins(pins), store, max_bytes, label)
    named = named_paths(raw, split, choice, fixed_rows)
    wanted = {path: rows for path, rows in named.items() if not EMBEDDED.fullmatch(path)}
    write_account(account, fetch.fetch(wanted, picture_roots))


if __name__ == "__main__":
    run_stage(main, globals().get("snakemake"))
