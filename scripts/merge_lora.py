"""Merge a trained LoRA into its base model, shard by shard."""

from pathlib import Path

from harness.stage import run_stage
from vlmflow.fetch.model_folder import read_model_manifest
from vlmflow.merging.merge import merge_adapter
from vlmflow.training.checkpoint import refuse_changed_adapter


def main(*, model: Path, adapter: Path, merged: Path, threads: int = 1) -> None:
    """Write base + adapter in the base's own layout.

    model: the base model's folder with its manifest, as fetch_model makes it.
    adapter: the training's folder (checkpoints/RUN/full) with the adapter and its report.
    merged: the folder to write.
    threads: the number of cores to use.
    """
    refuse_changed_adapter(adapter)
    manifest = read_model_manifest(model)
    merge_adapter(manifest.folder, adapter, merged, manifest.files, threads)


if __name__ == "__main__":
    run_stage(main, globals().get("snakemake"))
