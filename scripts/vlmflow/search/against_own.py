"""Whether the best trial of a search beats the run's own settings, on rows of val that chose neither.

The best of many trials is the luckiest, too. So the rows that ranked the trials do not judge the winner
(`rows.halves`), and only one trial is compared.
"""

from collections.abc import Callable

from vlmflow.config.search_settings import Objective, SearchLimits
from vlmflow.core.errors import VlmflowError
from vlmflow.evaluation.accounts import QUESTION, Compared, MarginFigures
from vlmflow.evaluation.verdict import missing
from vlmflow.search.accounts import OWN, Judged
from vlmflow.search.objectives import NAMES
from vlmflow.search.study import STATES, Study, StudyTrial

Compare = Callable[[StudyTrial, StudyTrial], tuple[MarginFigures, bool]]
"""Takes trial 0 and another one; returns the figures of both (as base and as tuned) on the same rows of val, and
whether these chose nothing."""


def against_own(study: Study, digest: str, limits: SearchLimits, compare: Compare) -> Judged:
    """Return what became of the best trial. digest: SHA-256 of the study's account. limits: the search's.

    compare: is called only if two trials are to be compared; what it raises is passed on.
    """
    best, own = study.best(limits), study.trial(OWN)
    compared, chose_nothing, chosen = None, None, best.number if best else None
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
        sentence = _sentence(study.objective, best.number, compared, chose_nothing, kept=chosen == OWN)
    return Judged(
        search=study.search,
        study=digest,
        best=best.number if best else None,
        chosen=chosen,
        compared=compared,
        chose_nothing=chose_nothing,
        sentence=sentence,
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


def _sentence(objective: Objective, best: int, compared: Compared, chose_nothing: bool, *, kept: bool) -> str:
    rows = f"{compared.rows:,} rows of val that chose neither" if chose_nothing else f"{compared.rows:,} rows of val"
    change = compared.difference
    if objective == "eval_loss":
        what, unit, factor = "the loss of the answers", "nats per token", 1
    else:
        what, unit, factor = "the share of rows in which feedback helps", "points", 100
    figure = ".4f" if factor == 1 else ".1f"
    ends = change.ends(lambda end: f"{factor * end:+{figure}}")
    said = [
        f"Trial {best} has the best {NAMES[objective]}, but is not shown to beat the run's own settings (trial {OWN}): "
        "keep them."
        if kept
        else f"Trial {best} beats the run's own settings (trial {OWN}).",
        f"On {rows}, trial {best} changes {what} by {factor * change.mean:+{figure}}{ends} {unit}.",
    ]
    if too_few := missing(compared):
        said.append(f"Too few rows to show more: {too_few}.")
    if not chose_nothing:
        said.append("Val also chose these trials and their checkpoints: it has too few pictures to be halved.")
    return " ".join(said)
