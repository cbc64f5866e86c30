"""Train the adapter to its last step, and hand on the best checkpoint by validation loss."""

from pathlib import Path

from harness.stage import run_stage
from vlmflow.config.run_settings import TrainSettings
from vlmflow.files import read_json, whole_folder, write_json
from vlmflow.training.checkpoint import copy_adapter
from vlmflow.training.data import validated_data
from vlmflow.training.gate import refuse_failed
from vlmflow.training.job import BaseModel, TrainJob
from vlmflow.training.report import draw_losses, report
from vlmflow.training.train import train


def main(
    *,
    train_rows: Path,
    val_rows: Path,
    stats: Path,
    model: Path,
    smoke: Path,
    full: Path,
    settings: TrainSettings,
    device: str,
    processes: int,
    strategy: str,
    model_type: str,
    picture_store: Path,
    run_store: Path,
    threads: int = 1,
) -> None:
    """Run the full training of one run.

    train_rows, val_rows, stats: the validated data set. model: folder with the base model's manifest.
    smoke: the smoke stage's folder, whose gate must be open.
    full: the folder to write (checkpoints/RUN/full): the best adapter, the report, the loss curve.
    settings, device, processes, strategy, model_type: see docs/config.md.
    picture_store, run_store: the folders that hold all picture stores and all run folders.
    """
    run = full.parent.name
    refuse_failed(read_json(smoke / "gate.json"), run)
    data = validated_data(train_rows, val_rows, stats, picture_store)
    job = TrainJob(data, BaseModel.read(model, model_type), settings, device, processes, strategy)
    trained = train(job, run_store / run / "full", threads, f"train_lora {run}")
    account = report(job, trained)
    with whole_folder(full) as finished:
        copy_adapter(trained.best.folder, finished)
        write_json(finished / "report.json", account)
        draw_losses(account, f"{run}: full run", finished / "loss.png")


if __name__ == "__main__":
    run_stage(main, globals().get("snakemake"))
