"""The settings that a search recommends, as an overlay for the configuration."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import yaml

from vlmflow.config.chosen_by import ChosenBy
from vlmflow.config.search_settings import SearchLimits, nested
from vlmflow.core.account import read_account
from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import sha256_of
from vlmflow.core.printable import counted, printable
from vlmflow.search.accounts import OWN, Judged
from vlmflow.search.study import Study, StudyTrial


def read_judged(file: Path, study: Path) -> Judged:
    """Read what became of a search's best trial; raises VlmflowError if it is of another account than `study`."""
    found = read_account(file, Judged)
    if found.study != sha256_of(study):
        raise VlmflowError(f"{file}: it is of another {study}", f"remove {file}, and run the same command again")
    return found


def best_of(study: Study, judged: Judged, limits: SearchLimits) -> StudyTrial:
    """Return the trial whose settings the overlay has: the best one, or the run's own that it is not shown to beat.

    Raises VlmflowError with what became of all trials if none is a result.
    """
    if judged.chosen is not None:
        return study.trial(judged.chosen)
    states = Counter(
        trial.state if trial.within(limits) else f"{trial.state}, above its limits" for trial in study.trials
    )
    reasons = dict.fromkeys(trial.reason for trial in study.trials if trial.state == "failed" and trial.reason)
    said = f"; why they failed: {'; '.join(map(printable, list(reasons)[:3]))}" if reasons else ""
    counts = ", ".join(f"{count} {state}" for state, count in states.items()) or "none was asked"
    raise VlmflowError(
        f"search {study.search}: no trial trained to its end within the limits ({counts}){said}",
        f"see reports/search-{study.search}.html; change search.{study.search}.space, or raise its limits: trials that "
        "were stopped, or wait, go on where they ended",
    )


def refuse_other_results(study: Study, file: Path, results: Sequence[Path]) -> None:
    """Raise VlmflowError with the results that differ from those that the study learned from. file: its account."""
    found = {"/".join(result.parts[-3:]): sha256_of(result) for result in results}
    if differ := sorted(
        name for name in found.keys() | study.digests.keys() if found.get(name) != study.digests.get(name)
    ):
        raise VlmflowError(
            f"search/{study.search}: {file} was made from other results: {', '.join(differ[:3])}",
            f"tell them again: snakemake --forcerun tell -- search/{study.search}/best.yaml",
        )


def overlay(study: Study, judged: Judged, chosen: StudyTrial, run: str, seed: int) -> str:
    """Return the overlay as YAML. chosen: the trial whose settings it has (`best_of`). run, seed: the search's."""
    count, done = len(study.trials), sum(trial.state == "done" for trial in study.trials)
    whose = ", the run's own settings" if chosen.number == OWN else ""
    lines = [
        f"# search: {study.search}: {counted(count, 'trial')}, of which {done} trained to the end",
        f"# {' '.join(judged.sentence.split())}",
        f"# trial: {chosen.number} (round {chosen.round}, step {chosen.steps}{whose})",
        f"# {study.objective}: {chosen.value!r}",
        f"# seed: {seed}; study.json: sha256 {judged.study}",
        "# Train with it: snakemake --configfile YOUR-RUN.yaml THIS-FILE",
    ]
    chosen_by = ChosenBy(
        search=study.search, trial=chosen.number, trials=count, study=judged.study, settings=chosen.settings
    )
    settings = {"runs": {run: {"chosen_by": chosen_by.model_dump(), "train": nested(chosen.settings)}}}
    return "\n".join(lines) + f"\n{yaml.safe_dump(settings, sort_keys=False)}"
