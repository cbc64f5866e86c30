"""Estimate memory, time and price of a run from its settings, its rows' lengths and the model's config.json."""

from pathlib import Path

from vlmflow.config.run_settings import RunSettings
from vlmflow.config.settings import PartOf
from vlmflow.config.strategies import tuner_of
from vlmflow.core.account import write_account
from vlmflow.core.errors import log
from vlmflow.estimate.account import NoEstimate
from vlmflow.estimate.changes import judge
from vlmflow.estimate.estimate import estimate_of_run
from vlmflow.fetch.placed import read_small_files
from vlmflow.harness.stage import run_stage
from vlmflow.lengths.steps import schedule_in_words
from vlmflow.swift.adapter_targets import adapter_targets


def main(
    *, train: Path, val: Path, summary: Path, model_files: Path, estimate: Path, settings: PartOf[RunSettings]
) -> None:
    """Estimate one run, and refuse it if it does not fit, or its adapter and the model's experts do not go together.

    train, val, summary: the files of measure_lengths (lengths/RUN).
    model_files: the base model without its weights (model_files/MODEL).
    estimate: the account to write (estimates/RUN.json). settings: those of the run.
    """
    adapter_targets(read_small_files(model_files), settings.train, tuner_of(settings.tuner))  # may refuse
    account = estimate_of_run(train, val, summary, model_files, settings)
    if not isinstance(account, NoEstimate):
        log.info(f"{estimate.stem}: {schedule_in_words(account.steps, account.evaluations)}")
        for note in account.notes:
            log.warning(f"{estimate.stem}: {note}")
        judge(account, estimate.stem, on_gpu=settings.device == "cuda", ignored=settings.estimate == "ignore")
    write_account(estimate, account)


if __name__ == "__main__":
    run_stage(main, globals().get("snakemake"))
