"""The settings that a search recommends, and whether they beat the run's own, on rows of val that chose neither.

The best of many trials is the luckiest, too. So the rows that ranked the trials do not judge the winner
(`rows.holdout`), and only one trial is compared. The settings are an overlay for the configuration; a second one has
those of a trial that is better there, but not shown to be.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import yaml

from vlmflow.config.after_training import ChosenBy
from vlmflow.config.search_settings import Objective, SearchLimits, nested
from vlmflow.core.account import read_account
from vlmflow.core.errors import VlmflowError, counted, printable
from vlmflow.core.files import sha256_of
from vlmflow.evaluation.report import QUESTION, Choice, Compared, MarginFigures
from vlmflow.evaluation.verdict import missing, too_few_groups
from vlmflow.search.study import NAMES, OWN, STATES, Judged, Study, StudyTrial, cost, shown

Compare = Callable[[StudyTrial, StudyTrial], tuple[MarginFigures, bool]]
"""Takes trial 0 and another one; returns the figures of both (as base and as tuned) on the same rows of val, and
whether these chose nothing."""


def against_own(study: Study, digest: str, limits: SearchLimits, compare: Compare) -> Judged:
    """Return what became of the best trial. digest: SHA-256 of the study's account. limits: the search's.

    compare: is called only if two trials are to be compared; what it raises is passed on.
    """
    best, own = study.best(limits), study.trial(OWN)
    compared, chose_nothing = None, None
    chosen = probably = best.number if best else None
    if best is None:
        sentence = "No trial trained to its end within the limits."
    elif best.number == OWN:
        sentence = (
            f"No trial has a better {NAMES[study.objective]} than the run's own settings (trial {OWN}): keep them."
        )
    elif own.state != "done" or not own.within(limits):
        why = STATES[own.state] if own.state != "done" else "above a limit"
        sentence = (
            f"Trial {best.number} has the best {NAMES[study.objective]}. Nothing shows that it beats the run's own "
            f"settings: trial {OWN}, which has them, gave no result ({why})."
        )
    else:
        figures, chose_nothing = compare(own, best)
        compared = decisive(study.objective, figures)
        chosen = best.number if is_better(study.objective, compared) else OWN
        probably = best.number if cost(study.objective, compared.difference.mean) < 0 else OWN
        sentence = _sentence(study, (own, best), compared, chose_nothing, chosen=chosen, probably=probably)
    return Judged(
        search=study.search,
        study=digest,
        best=best.number if best else None,
        chosen=chosen,
        probably=probably,
        compared=compared,
        chose_nothing=chose_nothing,
        sentence=sentence,
    )


def refuse_too_few_to_recommend(search: str, choice: Choice, objective: Objective) -> None:
    """Refuse a search whose best trial could never be shown to beat the run's own settings. choice: of the run's val.

    Raises VlmflowError with how many pictures or questions are missing.
    """
    if few := too_few_groups(choice.all_groups if objective == "eval_loss" else choice.groups):
        raise VlmflowError(
            f"search {search}: it could never recommend a trial: the rows of {choice.split} of data set "
            f"{choice.dataset} that judge {NAMES[objective]} have {few}",
            f"take more rows into val (val_share of datasets.{choice.dataset}), or compare runs by hand",
        )


def decisive(objective: Objective, figures: MarginFigures) -> Compared:
    """Return the figures that an objective stands for: *uses feedback*, or the loss of a row's answers.

    figures: for the loss, of rows that were evaluated as those of a data set without feedback: it is that of all
    answers that are trained, as the validation loss, in nats per token.

    Raises VlmflowError if rows have no feedback, and the objective needs it.
    """
    if objective == "eval_loss":
        return figures.losses[QUESTION]
    if figures.uses_feedback is None:
        raise VlmflowError(f"val: its rows have no feedback, which {objective} compares", "set objective: eval_loss")
    return figures.uses_feedback


def is_better(objective: Objective, compared: Compared) -> bool:
    """Return whether the tuned model of two is shown to be better: by the whole interval of the paired difference."""
    if missing(compared):
        return False
    return compared.difference.below_zero if objective == "eval_loss" else compared.difference.above_zero


def _sentence(
    study: Study,
    pair: tuple[StudyTrial, StudyTrial],
    compared: Compared,
    chose_nothing: bool,
    chosen: int,
    probably: int,
) -> str:
    """Return what a comparison shows. pair: trial 0 and the best. chosen, probably: as in `Judged`."""
    objective, best = study.objective, pair[1].number
    rows = f"{compared.rows:,} rows of val that chose neither" if chose_nothing else f"{compared.rows:,} rows of val"
    change = compared.difference
    if objective == "eval_loss":
        name, unit, factor = "the loss of the answers", "nats per token", 1
    else:
        name, unit, factor = "the share of rows in which feedback helps", "points", 100
    figure = ".4f" if factor == 1 else ".1f"
    ends = change.ends(lambda end: f"{factor * end:+{figure}}")
    if chosen == best:
        outcome = f"Trial {best} beats the run's own settings (trial {OWN})."
    elif probably == best:
        outcome = (
            f"Trial {best} is probably better, not shown: best.yaml keeps the run's own settings (trial {OWN}); "
            f"probably.yaml has those of trial {best}, and is used in the same way."
        )
    else:
        outcome = (
            f"Trial {best} has the best {NAMES[objective]}, but is not shown to beat the run's own settings "
            f"(trial {OWN}): keep them."
        )
    sentences = [
        outcome,
        f"On {rows}, trial {best} changes {name} by {factor * change.mean:+{figure}}{ends} {unit}.",
    ]
    if too_few := missing(compared):
        sentences.append(f"Too few rows to show more: {too_few}.")
    if not chose_nothing:
        sentences.append(
            f"Val also chose these trials and their checkpoints, which flatters trial {best}: it has too few pictures "
            "to be halved."
        )
    elif chosen != probably:
        of_own, of_best = (shown(objective, trial.value) for trial in pair if trial.value is not None)
        sentences.append(
            f"Expect this change, not that of the half that chose trial {best} and so flatters it: "
            f"{NAMES[objective]} {of_best}, trial {OWN}'s {of_own}."
        )
    return " ".join(sentences)


def read_judged(file: Path, study: Path) -> Judged:
    """Read what became of a search's best trial; raises VlmflowError if it is of another account than `study`."""
    account = read_account(file, Judged)
    if account.study != sha256_of(study):
        raise VlmflowError(f"{file}: it is of another {study}", f"remove {file}, and run the same command again")
    return account


def best_of(study: Study, number: int | None, limits: SearchLimits) -> StudyTrial:
    """Return the trial whose settings an overlay has. number: `chosen` or `probably` of what became of the best one.

    Raises VlmflowError with what became of all trials if none is a result.
    """
    if number is not None:
        return study.trial(number)
    states = Counter(
        trial.state if trial.within(limits) else f"{trial.state}, above its limits" for trial in study.trials
    )
    reasons = dict.fromkeys(trial.reason for trial in study.trials if trial.state == "failed" and trial.reason)
    why = f"; why they failed: {'; '.join(map(printable, list(reasons)[:3]))}" if reasons else ""
    counts = ", ".join(f"{count} {state}" for state, count in states.items()) or "none was asked"
    raise VlmflowError(
        f"search {study.search}: no trial trained to its end within the limits ({counts}){why}",
        f"see reports/search-{study.search}.html; change search.{study.search}.space, or raise its limits: trials that "
        "were stopped, or wait, go on where they ended",
    )


def refuse_other_results(study: Study, file: Path, results: Sequence[Path]) -> None:
    """Raise VlmflowError with the results that differ from those that the study learned from. file: its account."""
    digests = {"/".join(result.parts[-3:]): sha256_of(result) for result in results}
    if differ := sorted(
        name for name in digests.keys() | study.digests.keys() if digests.get(name) != study.digests.get(name)
    ):
        raise VlmflowError(
            f"search/{study.search}: {file} was made from other results: {', '.join(differ[:3])}",
            f"tell them again: snakemake --forcerun tell -- search/{study.search}/best.yaml",
        )


def overlay(study: Study, judged: Judged, chosen: StudyTrial, run: str, seed: int) -> str:
    """Return the overlay as YAML. chosen: the trial whose settings it has (`best_of`). run, seed: the search's."""
    count, done = len(study.trials), sum(trial.state == "done" for trial in study.trials)
    beats = judged.compared is not None and is_better(study.objective, judged.compared)
    whose = ", the run's own settings" if chosen.number == OWN else ""
    lines = [
        f"# search: {study.search}: {counted(count, 'trial')}, of which {done} trained to the end",
        f"# {' '.join(judged.sentence.split())}",
        f"# trial: {chosen.number} (round {chosen.round}, step {chosen.steps}{whose})",
        f"# {study.objective}: {chosen.value!r}, by the rows of val that chose among trials and checkpoints: too good",
        f"# seed: {seed}; study.json: sha256 {judged.study}",
        "# Train with it: snakemake --configfile YOUR-RUN.yaml THIS-FILE",
    ]
    chosen_by = ChosenBy(
        search=study.search,
        trial=chosen.number,
        trials=count,
        shown=chosen.number == OWN or beats,
        study=judged.study,
        settings=chosen.settings,
    )
    settings = {"runs": {run: {"chosen_by": chosen_by.model_dump(), "train": nested(chosen.settings)}}}
    return "\n".join(lines) + f"\n{yaml.safe_dump(settings, sort_keys=False)}"
