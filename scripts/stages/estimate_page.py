"""Write the page of a run's estimate: memory, hours, price, disk, and what would make the run fit."""

from pathlib import Path

from vlmflow.config.run_settings import RunSettings
from vlmflow.config.settings import PartOf
from vlmflow.core.errors import log
from vlmflow.core.files import write_text
from vlmflow.estimate.account import NoEstimate
from vlmflow.estimate.changes import advice, in_words
from vlmflow.estimate.estimate import estimate_of_run
from vlmflow.harness.stage import run_stage
from vlmflow.reports.planning_pages import estimate_page


def main(
    *, train: Path, val: Path, summary: Path, model_files: Path, page: Path, settings: PartOf[RunSettings]
) -> None:
    """Write the page.

    train, val, summary: the files of measure_lengths (lengths/RUN).
    model_files: the base model without its weights (model_files/MODEL). page: the HTML file to write.
    settings: those of the run.
    """
    account = estimate_of_run(train, val, summary, model_files, settings)
    run = summary.parent.name
    write_text(page, estimate_page(run, account, settings))
    if not isinstance(account, NoEstimate):
        words = in_words(account, run, on_gpu=settings.device == "cuda")
        follows = f". {advice(account.changes)}" if account.changes else ""
        log.info(f"{words}{follows}. All figures: {page}")


if __name__ == "__main__":
    run_stage(main, globals().get("snakemake"))
