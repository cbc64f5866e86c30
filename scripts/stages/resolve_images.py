"""Find and check the pictures that the rows of a split name, and add them to the picture store."""

from contextlib import nullcontext
from pathlib import Path

from vlmflow.config.settings import PictureLimits, RowChoice
from vlmflow.core.processes import UNDIVIDED, Part, items_of
from vlmflow.fetch.placed import refuse_changed_raw
from vlmflow.harness.stage import run_stage
from vlmflow.pictures import resolve
from vlmflow.pictures.roots import PictureRoots
from vlmflow.pictures.store import PictureStore
from vlmflow.raw import named


def main(
    *,
    raw: list[Path],
    manifest: Path,
    dataset: str,
    roots: list[str],
    store: Path,
    limits: PictureLimits,
    choice: RowChoice | None = None,
    fixed_rows: list[Path] = [],  # noqa: B006
    raw_accounts: list[Path] = [],  # noqa: B006
    part: Part = UNDIVIDED,
    threads: int = 1,
) -> None:
    """Resolve the pictures of one split.

    raw: the files of the split's raw rows.
    manifest: JSON lines to write, one for each distinct path that the rows name.
    dataset: the data set's name in the configuration.
    roots: the folders with its pictures; the first one that has a picture wins.
    store: the folder with all picture stores; the data set's own has its name.
    limits: the limits of pictures.
    choice: which rows are used. fixed_rows: files of edited rows. raw_accounts: the account of each raw file; [] skips
    their check.
    part: this part and the number of parts, if several pods share the pictures; the stage that joins them then logs
    what was found.
    """
    key = f"datasets.{dataset}.image_roots"
    PictureRoots(roots, key)  # refuses a missing one before anything is read
    split = manifest.name.partition(".")[0]
    refuse_changed_raw(raw, raw_accounts)
    out_of_rows = store / named.ROOT
    all_used = part == UNDIVIDED and (choice is None or choice.takes_all)
    with named.kept_in(out_of_rows) if all_used else nullcontext():
        paths = resolve.named_paths(raw, split, choice, fixed_rows, threads)
    paths = dict(items_of(part, paths.items()))
    if own := {path for path in paths if named.EMBEDDED.fullmatch(path)}:
        out_of_rows.mkdir(parents=True, exist_ok=True)  # rows may also name files that are called so in other roots
        roots = [str(out_of_rows), *roots]
        if not all_used:
            with named.kept_in(out_of_rows, own):
                resolve.named_paths(raw, split, choice, fixed_rows, threads)
    where, label = PictureStore(store, dataset), f"resolve_images {dataset}/{manifest.stem}"
    entries = resolve.resolve_pictures(paths, PictureRoots(roots, key), where, limits, threads, label)
    if part == UNDIVIDED:
        resolve.say_what_was_found(entries, key)
    resolve.write_picture_manifest(manifest, entries)


if __name__ == "__main__":
    run_stage(main, globals().get("snakemake"))
