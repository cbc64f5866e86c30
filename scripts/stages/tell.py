"""Add the results of one step of a search to its study."""

from pathlib import Path

from vlmflow.config.search_settings import SearchSettings
from vlmflow.config.settings import PartOf
from vlmflow.core.account import read_account, write_account
from vlmflow.core.errors import log
from vlmflow.harness.stage import run_stage
from vlmflow.search.journal import tell
from vlmflow.search.study import STATES, Study, TrialResult, read_asked


def main(
    *,
    asked: Path,
    asked_journal: Path,
    results: list[Path],
    before: list[Path],
    study: Path,
    journal: Path,
    settings: PartOf[SearchSettings],
) -> None:
    """Add the results of one step.

    asked, asked_journal: what it asked, with the journal (propose). results: of its trials, in the order of the slots.
    before: the study's account after the step before; [] for the first.
    study: the account to write (search/NAME/ROUND/RUNG/study.json). journal: the journal to write beside it.
    settings: those of the search.
    """
    told = tell(
        read_asked(asked),
        {file: read_account(file, TrialResult) for file in results},
        read_account(before[0], Study) if before else None,
        (asked_journal, journal),
        (settings.objective, settings.rungs, settings.limits),
    )
    write_account(study, told)
    states = [STATES[trial.state] for trial in told.trials]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states)) or "none"
    log.info(
        f"search {told.search}, after round {told.last[0]}, rung {told.last[1]}: trials: {counts}; "
        f"{told.gpu_hours:.3g} GPU-hours"
    )


if __name__ == "__main__":
    run_stage(main, globals().get("snakemake"))
