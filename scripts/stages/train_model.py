"""Train to the last step, and keep the best checkpoint by validation loss."""

import shutil
from pathlib import Path

from vlmflow.config.run_blocks import FlatRun
from vlmflow.config.settings import PartOf
from vlmflow.core.account import read_account, write_account
from vlmflow.core.files import whole_folder
from vlmflow.harness.stage import run_stage
from vlmflow.in_trainer.messages import PROGRESS
from vlmflow.reports.training_pages import LivePage
from vlmflow.supervisor.plan import plan_training
from vlmflow.supervisor.report import Gate, release
from vlmflow.supervisor.smoke import refuse_failed, with_passes
from vlmflow.supervisor.train import draw_losses, report, train
from vlmflow.swift.arguments import Training


def main(
    *,
    rows: Path,
    model: Path,
    smoke: Path,
    full: Path,
    settings: PartOf[FlatRun],
    picture_store: Path,
    run_store: Path,
    pictures: list[Path] | None = None,
    threads: int = 1,
) -> None:
    """Run the full training of one run.

    rows: the run's rows that fit (fitted/RUN). model: folder with the base model's manifest.
    smoke: the smoke stage's folder, whose gate must be open.
    full: the folder to write (checkpoints/RUN/full): the best checkpoint's adapter or weights, the report, the events,
    the loss curve.
    settings: those of the run. picture_store, run_store: the folders with all picture stores and all run folders.
    pictures: the image manifests of the train and val splits; none if rows have no pictures.
    """
    run = full.parent.name
    gate = read_account(smoke / "gate.json", Gate)
    refuse_failed(gate, run)

    def look() -> Training:
        full = plan_training(settings, rows, model, picture_store, pictures or [])
        return with_passes(full, gate, run)

    training = look()
    page = LivePage(run, "full", training.settings).refresh
    trained = train(training, run_store / run / "full", threads, f"train_model {run}", onlooker=page)
    with trained.folder.set_aside_where_refused(f"train_model {run}"):
        look()  # check again: trainers read pictures for days
    account = report(training, trained)
    with whole_folder(full) as finished:
        release(trained.best.folder, finished, training.tuner)
        shutil.copyfile(trained.folder.progress, finished / PROGRESS)
        write_account(finished / "report.json", account)
        draw_losses(account, f"{run}: full run", finished / "loss.png")


if __name__ == "__main__":
    run_stage(main, globals().get("snakemake"))
