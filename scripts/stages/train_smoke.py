"""Train a few steps on the longest rows, and open or close the gate to the full run."""

from pathlib import Path

from vlmflow.config.run_blocks import FlatRun
from vlmflow.config.run_settings import SmokeSettings
from vlmflow.config.settings import PartOf
from vlmflow.core.account import write_account
from vlmflow.core.errors import log
from vlmflow.core.files import whole_folder
from vlmflow.estimate.account import fits_by, log_compared, read_estimate
from vlmflow.fetch.placed import read_model_manifest
from vlmflow.harness.stage import run_stage
from vlmflow.in_trainer.messages import read_events
from vlmflow.lengths.count import read_lengths
from vlmflow.lengths.summary import fitted_rows
from vlmflow.reports.former_trainings import to_train
from vlmflow.reports.training_pages import LivePage, gate_page
from vlmflow.supervisor.plan import plan_training
from vlmflow.supervisor.report import TrainingReport
from vlmflow.supervisor.smoke import (
    SmokeRows,
    capped,
    choose_rows,
    find_passes,
    gpu_memory,
    judge,
    refuse_failed,
    smoke_training,
)
from vlmflow.supervisor.train import Trained, draw_losses, report, train
from vlmflow.swift.arguments import Training
from vlmflow.swift.child_process import quick_imports

with quick_imports():
    from vlmflow.merging.merge import planned_merge


def main(
    *,
    rows: Path,
    model: Path,
    smoke: Path,
    settings: PartOf[FlatRun],
    smoke_settings: SmokeSettings,
    picture_store: Path,
    run_store: Path,
    estimate: Path | None = None,
    judging: Path | None = None,
    pictures: list[Path] | None = None,
    threads: int = 1,
) -> None:
    """Run the smoke stage of one run.

    rows: the run's rows that fit, with their lengths (fitted/RUN). model: folder with the base model's manifest.
    smoke: the folder to write (checkpoints/RUN/smoke): the gate, the report, the loss curve.
    settings, smoke_settings: those of the run.
    picture_store, run_store: the folders with all picture stores and all run folders.
    estimate: the account of estimate_run, which let the run start. judging: the rows of val that will judge it.
    pictures: the image manifests of the train and val splits; none if rows have no pictures.
    """
    run = smoke.parent.name
    full = plan_training(settings, rows, model, picture_store, pictures or [])
    train_lengths, val_lengths = (list(read_lengths(rows / f"{split}.lengths.jsonl")) for split in ("train", "val"))

    folder = run_store / run / "smoke"
    smoke_settings = capped(smoke_settings, full, len(train_lengths))

    def smoke_of(full: Training) -> tuple[SmokeRows, TrainingReport, Trained]:
        chosen = choose_rows(train_lengths, val_lengths, full, smoke_settings)
        training = smoke_training(full, chosen, smoke_settings, folder)
        page = LivePage(run, "smoke", training.settings).refresh
        trained = train(training, folder, threads, f"train_smoke {run}", resumes=False, onlooker=page)
        return chosen, report(training, trained), trained

    if full.settings.micro_batch_tokens == "auto":
        full, done = find_passes(full, fits_by(read_estimate(estimate), gpu_memory) if estimate else None, smoke_of)
    else:
        done = smoke_of(full)
    chosen, account, trained = done
    base = read_model_manifest(model)
    merge = planned_merge(base.folder, trained.best.folder, base.files)  # refuses as a merge would
    events = read_events(trained.folder.progress)
    fitted = fitted_rows(rows)
    gate = judge(account, events, chosen, train_lengths, val_lengths, full, fitted.splits, merge)
    write_account(trained.folder.path / "gate.json", gate)
    if estimate is not None:
        log_compared(read_estimate(estimate), account, run)
    refuse_failed(gate, run)
    log.info(f"{run}: the training touches {merge.touched} of {merge.tensors} tensors: {merge.layers}")
    if gate.without_adapter is not None:
        log.info(f"{run}: {gate.without_adapter:.1%} of the model's weights are in layers that get no adapter")
    if merge.logits_may_be_inconclusive:
        log.warning(
            f"{run}: rounding keeps {merge.rounding_leaves:.2f} of the smoke run's update; after a full run as short "
            "as this one, logits cannot show whether the merge is right, and only the comparison of tensors decides"
        )
    log.info(f"{run}: the gate is open; the full run: {gate.full_run.readable}")

    with whole_folder(smoke) as finished:
        write_account(finished / "gate.json", gate)
        write_account(finished / "report.json", account)
        made_of = to_train(base.source, fitted.dataset, settings)
        (finished / "gate.html").write_text(gate_page(run, gate, made_of), encoding="utf-8")
        draw_losses(account, f"{run}: smoke run", finished / "loss.png")


if __name__ == "__main__":
    run_stage(main, globals().get("snakemake"))
