"""Write the page of a run's full training, and of what was estimated before it."""

from pathlib import Path

from vlmflow.core.account import read_account, refuse_changed
from vlmflow.core.files import write_text
from vlmflow.estimate.account import read_estimate
from vlmflow.fetch.placed import MANIFEST, ModelManifest
from vlmflow.harness.stage import run_stage
from vlmflow.in_trainer.messages import PROGRESS, read_events
from vlmflow.reports.former_trainings import trained
from vlmflow.reports.training_pages import run_page
from vlmflow.supervisor.report import Gate, TrainingReport


def main(*, smoke: Path, full: Path, estimate: Path, model: Path, dataset: str, run_store: Path, page: Path) -> None:
    """Write the page.

    smoke, full: the folders of the smoke run and of the full run (checkpoints/RUN/…).
    estimate: the account of estimate_run. model: folder with the base model's manifest. dataset: its name.
    run_store: the folder with all run folders. page: the HTML file to write.
    """
    run = full.parent.name
    report, gate = read_account(full / "report.json", TrainingReport), read_account(smoke / "gate.json", Gate)
    refuse_changed(
        "files of events",
        full,
        {PROGRESS: report.digests.progress},
        f"progress/{run}",
        f"remove {full} and run the same command again: it is copied from its run folder",
    )
    of_smoke, estimated = read_account(smoke / "report.json", TrainingReport), read_estimate(estimate)
    made_of = trained(read_account(model / MANIFEST, ModelManifest).source, dataset, report)
    events = read_events(full / PROGRESS)
    html = run_page(run, events, report, gate, of_smoke, estimated, made_of, run_store / run / "full")
    write_text(page, html)


if __name__ == "__main__":
    run_stage(main, globals().get("snakemake"))
