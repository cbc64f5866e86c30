"""The best trial of a search, as an overlay for the configuration."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import yaml

from vlmflow.config.chosen_by import ChosenBy
from vlmflow.config.search_settings import SearchLimits, nested
from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import sha256_of
from vlmflow.core.printable import printable
from vlmflow.search.study import Study, StudyTrial


def best_of(study: Study, limits: SearchLimits) -> StudyTrial:
    """Return the best trial; raises VlmflowError with what became of all of them if none is a result."""
    if best := study.best(limits):
        return best
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


def overlay(study: Study, file: Path, best: StudyTrial, run: str, seed: int) -> str:
    """Return the overlay as YAML. file: the study's account. run: the search's. seed: of the search."""
    count, done = len(study.trials), sum(trial.state == "done" for trial in study.trials)
    digest = sha256_of(file)
    lines = [
        f"# search: {study.search}: the best of {count} trial(s), of which {done} trained to the end",
        f"# trial: {best.number} (round {best.round}, step {best.steps})",
        f"# {study.objective}: {best.value!r}",
        f"# seed: {seed}; study.json: sha256 {digest}",
        "# Train with it: snakemake --configfile YOUR-RUN.yaml THIS-FILE",
    ]
    chosen_by = ChosenBy(search=study.search, trial=best.number, trials=count, study=digest, settings=best.settings)
    settings = {"runs": {run: {"chosen_by": chosen_by.model_dump(), "train": nested(best.settings)}}}
    return "\n".join(lines) + f"\n{yaml.safe_dump(settings, sort_keys=False)}"
