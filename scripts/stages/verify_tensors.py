"""Verify the tensors of merged weights."""

from pathlib import Path

from vlmflow.config.strategies import tuner_of
from vlmflow.core.account import write_account
from vlmflow.fetch.placed import read_model_manifest
from vlmflow.harness.stage import run_stage
from vlmflow.merging.proof import VerifiedTensors, verified_files
from vlmflow.supervisor.report import read_release
from vlmflow.swift.child_process import quick_imports

with quick_imports():
    from vlmflow.merging.verify_tensors import verify_tensors


def main(*, merged: Path, full: Path, model: Path, tensors: Path, threads: int = 1) -> None:
    """Verify one run's merged tensors.

    merged: the merged folder (work/RUN/merged). full: the training's folder (checkpoints/RUN/full).
    model: folder with the base model's manifest. tensors: the account to write, with the digest of every merged file.
    threads: the number of cores to use.
    """
    base = read_model_manifest(model)
    tuner = tuner_of(read_release(full).tuner)
    files = verified_files(merged, run=merged.parent.name)  # before the comparison: a later change no longer has them
    compared = verify_tensors(base.folder, full, merged, base.files, threads, tuner)
    write_account(tensors, VerifiedTensors(compared, files))


if __name__ == "__main__":
    run_stage(main, globals().get("snakemake"))
