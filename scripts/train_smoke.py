"""Train a few steps on the longest rows, and open or close the gate to the full run."""

import logging
from pathlib import Path

from harness.stage import run_stage
from vlmflow.config.run_settings import SmokeSettings, TrainSettings
from vlmflow.files import whole_folder, write_json
from vlmflow.pictures.manifest import read_picture_manifest
from vlmflow.reports.pages import gate_page
from vlmflow.training.data import validated_data
from vlmflow.training.gate import check_lengths, judge, refuse_failed
from vlmflow.training.job import BaseModel, TrainJob
from vlmflow.training.lengths import row_lengths
from vlmflow.training.report import draw_losses, report
from vlmflow.training.smoke import choose_rows, smoke_job
from vlmflow.training.train import train


def main(
    *,
    train_rows: Path,
    val_rows: Path,
    stats: Path,
    pictures: Path,
    model: Path,
    smoke: Path,
    settings: TrainSettings,
    smoke_settings: SmokeSettings,
    device: str,
    processes: int,
    strategy: str,
    model_type: str,
    picture_store: Path,
    run_store: Path,
    threads: int = 1,
) -> None:
    """Run the smoke stage of one run.

    train_rows, val_rows, stats: the validated data set. pictures: image manifest of the train split.
    model: folder with the base model's manifest.
    smoke: the folder to write (checkpoints/RUN/smoke): the gate, the report, the loss curve.
    settings, smoke_settings, device, processes, strategy, model_type: see docs/config.md.
    picture_store, run_store: the folders that hold all picture stores and all run folders.
    """
    run = smoke.parent.name
    data = validated_data(train_rows, val_rows, stats, picture_store)
    full = TrainJob(data, BaseModel.read(model, model_type), settings, device, processes, strategy)

    entries = list(read_picture_manifest(pictures))
    train_lengths, val_lengths = (
        row_lengths(rows, entries, full.model.folder, settings.image_max_tokens) for rows in (train_rows, val_rows)
    )
    check_lengths(train_lengths + val_lengths, settings.max_length)

    folder = run_store / run / "smoke"
    chosen = choose_rows(train_lengths, val_lengths, full, smoke_settings)
    job = smoke_job(full, chosen, smoke_settings, folder)
    trained = train(job, folder, threads, f"train_smoke {run}")
    account = report(job, trained)
    gate = judge(account, chosen, train_lengths, val_lengths, full)
    write_json(trained.folder.path / "gate.json", gate)
    refuse_failed(gate, run)
    logging.getLogger("vlmflow").info(f"{run}: the gate is open; the full run: {gate['full_run']['readable']}")

    with whole_folder(smoke) as finished:
        write_json(finished / "gate.json", gate)
        write_json(finished / "report.json", account)
        (finished / "gate.html").write_text(gate_page(run, gate))
        draw_losses(account, f"{run}: smoke run", finished / "loss.png")


if __name__ == "__main__":
    run_stage(main, globals().get("snakemake"))
