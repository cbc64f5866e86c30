"""Prove the merged weights, write where they come from, and give them their name."""

import logging
import os
import shutil
from dataclasses import asdict
from pathlib import Path

from harness.stage import run_stage
from vlmflow.config.run_settings import VerifySettings
from vlmflow.fetch.model_folder import read_manifest
from vlmflow.files import read_json, remove, whole_folder, write_json
from vlmflow.merging.verify_logits import verify_logits
from vlmflow.merging.verify_tensors import verify_tensors
from vlmflow.reports.provenance import model_card, provenance
from vlmflow.reports.rights import rights
from vlmflow.training.data import first_rows

log = logging.getLogger("vlmflow")


def main(
    *,
    merged: Path,
    full: Path,
    smoke: Path,
    model: Path,
    rows: Path,
    stats: Path,
    verified: Path,
    verify: VerifySettings,
    device: str,
    dtype: str,
    image_max_tokens: int,
    picture_store: Path,
    data_sources: list[str],
    licence: str | None,
    source_licences: dict[str, str],
    picture_licences: dict[str, str],
    threads: int = 1,
) -> None:
    """Verify one run's merged weights.

    merged: the merged folder, whose files `verified` takes over. full, smoke: the training's folders.
    model: folder with the base model's manifest. rows: the run's rows that fit (fitted/RUN). stats: of the data set.
    verified: the folder to make (merged/RUN). verify, device, dtype, image_max_tokens: see docs/config.md.
    picture_store: the folder that holds all picture stores.
    data_sources: where the data set came from. licence, source_licences: see docs/config.md.
    picture_licences: those of picture_sources, by the beginnings of the pictures' paths.
    """
    base = read_manifest(model)
    remove(merged / ".snakemake_timestamp")  # Snakemake's own mark in a folder that a rule made
    proofs = {"tensors": asdict(verify_tensors(base.folder, full, merged, base.files, threads)), "logits": None}
    if verify.logits:
        log.info(f"comparing logits of base + adapter and of the merged weights on {verify.rows} rows ({device})")
        pictures = picture_store / read_json(stats)["dataset"]
        compared = first_rows(rows / "val.jsonl", verify.rows)
        proofs["logits"] = asdict(
            verify_logits(base.folder, full, merged, compared, pictures, device, dtype, image_max_tokens)
        )
    log.info("writing provenance.json: digests of all files")
    dataset = read_json(stats)["dataset"]
    stated = rights(dataset, data_sources, licence, source_licences, picture_licences, rows / "train.jsonl")
    facts = provenance(verified.name, stats, base, smoke, full, merged, proofs, stated, code=Path(__file__).parents[1])

    with whole_folder(verified) as folder:
        shutil.copytree(merged, folder, copy_function=link_or_copy, dirs_exist_ok=True)
        write_json(folder / "provenance.json", facts)
        (folder / "README.md").write_text(model_card(facts))


def link_or_copy(source: str, target: str) -> None:
    """Give a merged file a second name; Snakemake removes the first, which is temporary."""
    try:
        os.link(source, target)
    except OSError:  # merged/ is on another disk
        shutil.copy2(source, target)


if __name__ == "__main__":
    run_stage(main, globals().get("snakemake"))
