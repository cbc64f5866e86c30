"""Compute the perceptual hash of every usable picture of a split."""

from pathlib import Path

from vlmflow.core.processes import UNDIVIDED, Part
from vlmflow.harness.stage import run_stage
from vlmflow.pictures.look_alikes import hash_pictures


def main(
    *, manifest: Path, hashes: Path, dataset: str, picture_store: Path, part: Part = UNDIVIDED, threads: int = 1
) -> None:
    """Hash the pictures.

    manifest: the split's image manifest. hashes: JSON lines to write. dataset: the data set's name.
    picture_store: the folder with all picture stores.
    part: this part and the number of parts, if several pods share the pictures.
    """
    hash_pictures(manifest, hashes, picture_store / dataset, threads, part)


if __name__ == "__main__":
    run_stage(main, globals().get("snakemake"))
