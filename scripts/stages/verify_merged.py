"""Verify the answers of the merged weights, and keep the weights with the proof."""

from pathlib import Path

from vlmflow.config.run_blocks import FlatRun
from vlmflow.config.run_settings import QuantisationSettings
from vlmflow.config.settings import PartOf
from vlmflow.config.strategies import tuner_of
from vlmflow.core.account import read_account, refuse_other_rows
from vlmflow.core.errors import log
from vlmflow.core.files import FOLDER_MARK, remove, whole_folder
from vlmflow.fetch.placed import read_model_manifest
from vlmflow.harness.stage import run_stage
from vlmflow.lengths.against_swift import template_arguments
from vlmflow.lengths.summary import ACCOUNT, fitted_rows, pictures_of
from vlmflow.merging.proof import Checks, VerifiedTensors, refuse_other_files, take_over, write_proof
from vlmflow.pictures.store import refuse_changed_pictures
from vlmflow.rows.sharegpt import loss_scale
from vlmflow.rows.training_data import entries_named, first_rows
from vlmflow.supervisor.report import read_release
from vlmflow.swift.child_process import quick_imports
from vlmflow.swift.template_texts import named

with quick_imports():
    from vlmflow.merging.logits import inputs_of
    from vlmflow.merging.verify_logits import verify_logits, verify_stored_logits


def main(
    *,
    merged: Path,
    tensors: Path,
    full: Path,
    model: Path,
    rows: Path,
    verified: Path,
    settings: PartOf[FlatRun],
    picture_store: Path,
    pictures: list[Path] | None = None,
    threads: int = 1,
) -> None:
    """Verify one run's merged weights.

    merged: the merged folder, whose files `verified` takes over. tensors: what verify_tensors found in it.
    full: the training's folder (checkpoints/RUN/full).
    model: folder with the base model's manifest. rows: the run's rows that fit (fitted/RUN).
    verified: the folder to make (verified/RUN): the same files, and proof.json.
    settings: those of the run. picture_store: the folder with all picture stores.
    pictures: the image manifests of the train and val splits; none if rows have no pictures.
    """
    base = read_model_manifest(model)
    settings = named(settings, base.folder)
    report = read_release(full)
    tuner = tuner_of(report.tuner)
    refuse_other_rows(rows / ACCOUNT)
    compared, store = first_rows(rows / "val.jsonl", settings.verify.rows), pictures_of(rows, picture_store)
    images = {name for row in compared for name in row.images}
    refuse_changed_pictures(store, entries_named(images, pictures or []).values())
    checked, logits = read_account(tensors, VerifiedTensors), None
    refuse_other_files(merged, checked.files, verified.name, f"remove {merged} and run the same command again")
    if settings.verify.logits and tuner.trains_adapter:
        log.info(
            f"comparing logits of base + adapter and of the merged weights on {len(compared)} rows ({settings.device})"
        )
        quantisation = QuantisationSettings(**report.settings["quantisation"]) if tuner.quantises else None
        scale = loss_scale(fitted_rows(rows).last_answer_only)
        arguments = template_arguments(merged, settings.model_type, scale, settings.text_args)
        inputs = inputs_of(compared, arguments, store, settings.image_max_tokens, threads)
        logits = verify_logits(base.folder, full, merged, inputs, settings.device, settings.dtype, quantisation)
    elif settings.verify.logits:
        log.info(f"comparing the logits that the trainer stored with those of the merged weights ({settings.device})")
        logits = verify_stored_logits(base.folder, full, merged, settings.device, settings.dtype)
    with whole_folder(verified) as folder:
        take_over(merged, folder)  # Snakemake removes the first, temporary name of each file
        remove(folder / FOLDER_MARK)
        write_proof(folder, Checks(checked.tensors, logits), checked.files, code=Path(__file__).parents[2])


if __name__ == "__main__":
    run_stage(main, globals().get("snakemake"))
