"""Join the image manifests that several pods made of one split."""

from pathlib import Path

from vlmflow.harness.stage import run_stage
from vlmflow.pictures.resolve import join_picture_manifests


def main(*, parts: list[Path], manifest: Path, dataset: str) -> None:
    """Join the manifests.

    parts: the manifests of all parts, in their order. manifest: JSON lines to write.
    dataset: the data set's name in the configuration.
    """
    join_picture_manifests(parts, manifest, f"datasets.{dataset}.image_roots")


if __name__ == "__main__":
    run_stage(main, globals().get("snakemake"))
