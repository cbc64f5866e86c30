"""Bring what a run trained into the weights of its base model, shard by shard."""

from pathlib import Path

from vlmflow.fetch.placed import read_model_manifest
from vlmflow.harness.stage import run_stage
from vlmflow.supervisor.report import read_release
from vlmflow.swift.child_process import quick_imports

with quick_imports():
    from vlmflow.merging.merge import merge_weights


def main(*, model: Path, full: Path, merged: Path, threads: int = 1) -> None:
    """Write base + adapter, or the trained weights, in the base's own layout.

    model: the base model's folder with its manifest, as fetch_model makes it.
    full: the training's folder (checkpoints/RUN/full): what it trained, and its report.
    merged: the folder to write.
    threads: the number of cores to use.
    """
    read_release(full)  # its files are still those that the training released
    manifest = read_model_manifest(model)
    merge_weights(manifest.folder, full, merged, manifest.files, threads)


if __name__ == "__main__":
    run_stage(main, globals().get("snakemake"))
