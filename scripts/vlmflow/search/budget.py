"""What a search may still spend, and what it is estimated to need before its first trial."""

import logging
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from vlmflow.config.search_settings import SearchSettings
from vlmflow.config.search_steps import trials_of_rung
from vlmflow.core.account import read_account
from vlmflow.core.errors import VlmflowError
from vlmflow.core.printable import counted
from vlmflow.estimate.accounts import NoEstimate, read_estimate
from vlmflow.supervisor.accounts import Gate

log = logging.getLogger("vlmflow")


def refuse_too_much(
    name: str, search: SearchSettings, hours: tuple[float, float] | None, ranks: int, stops: Sequence[int]
) -> None:
    """Refuse a search whose trials are estimated to need more than its budget even at best; warn if they may.

    hours: of one whole training of its run, at best and at worst; None if nothing tells. ranks: the trainers. stops:
    the steps after which its rungs stop.

    Raises VlmflowError with both figures.
    """
    budget = search.limits.gpu_hours
    if budget is None:
        return
    if hours is None:
        log.warning(
            f"search {name}: nothing tells how long a trial takes; limits.gpu_hours ({budget:g}) ends the search"
        )
        return
    low, high = (trainings_of(search, stops) * each * ranks for each in hours)
    needed = f"{low:.3g} to {high:.3g}" if low < high else f"{low:.3g}"
    figures = (
        f"search.{name}.limits.gpu_hours: {budget:g}, but {counted(search.rounds, 'round')} of "
        f"{counted(search.together, 'trial')}, and "
        f"one with the run's own settings, are estimated to need {needed} GPU-hours"
    )
    if low > budget:
        raise VlmflowError(
            f"{figures}: nothing was started",
            f"raise it, lower search.{name}.rounds or together, or add a rung: only the best third then trains on",
        )
    if high > budget:
        log.warning(f"{figures}; when they are spent, the search ends with what it has")


def trainings_of(search: SearchSettings, stops: Sequence[int]) -> float:
    """Return how many whole trainings all trials are together: a rung goes on where the one before ended.

    stops: the steps after which the rungs stop; the last is the whole training's.
    """
    steps = stops[-1]  # trial 0, the run's own settings
    for rung, (before, stop) in enumerate(pairwise([0, *stops])):
        steps += search.rounds * trials_of_rung(search.together, rung) * (stop - before)
    return steps / stops[-1]


def hours_of_run(estimate: Path, smoke: Path | None, gpu: str | None) -> tuple[float, float] | None:
    """Return the hours of the whole training of a run, at best and at worst; None if nothing tells.

    estimate: estimates/RUN.json, asked for a run that names its GPU. smoke: checkpoints/RUN/smoke of any other, whose
    steps were measured.
    """
    if smoke is not None:
        hours = read_account(smoke / "gate.json", Gate).full_run.seconds / 3600
        return hours, hours
    found = read_estimate(estimate)
    on = None if isinstance(found, NoEstimate) else found.on(gpu)
    return (on.fast.hours, on.slow.hours) if on else None


def hours_each(search: SearchSettings, spent: float, trials: int, ranks: int, trained: float) -> float | None:
    """Return how long one trial of a step may train; None without a limit, 0 if nothing is left.

    spent: GPU-hours so far. trials: of the step. ranks: trainers of each. trained: hours that this trial has trained.
    """
    limits, most = search.limits, []
    if limits.gpu_hours is not None:
        most.append(max(0.0, limits.gpu_hours - spent) / trials / ranks)
    if limits.hours is not None:
        most.append(max(0.0, limits.hours - trained))
    return min(most, default=None)
