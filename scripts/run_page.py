"""Write the page of a run's full training, and of what was estimated before it."""

from pathlib import Path

from harness.stage import run_stage
from vlmflow.core.account import read_account
from vlmflow.core.files import whole_file
from vlmflow.core.integrity import refuse_changed
from vlmflow.estimate.accounts import read_estimate
from vlmflow.reports.run_page import run_page
from vlmflow.trainer.events import read_events
from vlmflow.trainer.orders import PROGRESS
from vlmflow.training.accounts import Gate, TrainingReport


def main(*, smoke: Path, full: Path, estimate: Path, page: Path) -> None:
    """Write the page.

    smoke, full: the folders of the smoke run and of the full run (checkpoints/RUN/…).
    estimate: the account of estimate_run. page: the HTML file to write.
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
    html = run_page(run, read_events(full / PROGRESS), report, gate, of_smoke, estimated)
    with whole_file(page, "w") as file:
        file.write(html)


if __name__ == "__main__":
    run_stage(main, globals().get("snakemake"))
