"""Write the best settings that a search found, as an overlay for the configuration."""

from pathlib import Path

from vlmflow.config.search_settings import SearchSettings
from vlmflow.config.settings import PartOf
from vlmflow.core.account import read_account
from vlmflow.core.errors import log
from vlmflow.core.files import write_text
from vlmflow.harness.stage import run_stage
from vlmflow.search.best import best_of, overlay, read_judged, refuse_other_results
from vlmflow.search.study import Study


def main(
    *, study: Path, judged: Path, results: list[Path], best: Path, probably: Path, settings: PartOf[SearchSettings]
) -> None:
    """Write the overlay, and a second one with the settings that are probably the best, shown to be or not.

    study: the search's account after its last step. judged: what became of its best trial (judge_best). results: those
    of all its trials.
    best, probably: the files to write (search/NAME/best.yaml, probably.yaml). settings: those of the search.
    """
    account = read_account(study, Study)
    refuse_other_results(account, study, results)
    outcome = read_judged(judged, study)
    for number, file in ((outcome.probably, probably), (outcome.chosen, best)):
        trial = best_of(account, number, settings.limits)
        write_text(file, overlay(account, outcome, trial, settings.run, settings.seed))
        log.info(f"search {account.search}: {file.name} has the settings of trial {trial.number}: {trial.settings}")
    log.info(f"search {account.search}: {outcome.sentence}")


if __name__ == "__main__":
    run_stage(main, globals().get("snakemake"))
