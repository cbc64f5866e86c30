"""What a step of a search asks: new trials in the first rung, the best third of the rung before in others.

Before its first trial the search is refused if it may not spend what it is estimated to need.
"""

import math
import shutil
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from vlmflow.config.run_settings import TrainSettings
from vlmflow.config.search_settings import (
    SearchSettings,
    dimensions,
    share_of_rung,
    slots_of,
    step_before,
    trained_with,
    trials_of_rung,
)
from vlmflow.core.account import read_account
from vlmflow.core.errors import VlmflowError, counted, log
from vlmflow.core.files import whole_file
from vlmflow.estimate.account import NoEstimate, read_estimate
from vlmflow.lengths.steps import Steps, scheduled
from vlmflow.search.journal import new_trials
from vlmflow.search.study import OWN, Asked, AskedTrial, Study, ranked
from vlmflow.supervisor.report import Gate

SPENT = "the budget is spent (limits.gpu_hours)"

FEW = "too few trials finished the rung before within the limits"

ASKED_BEFORE = "no combination was found that was not asked before"

BATCH = ("per_device_batch_size", "gradient_accumulation_steps")
"""The searched keys that change the number of steps."""


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
    account = read_estimate(estimate)
    on = None if isinstance(account, NoEstimate) else account.on(gpu)
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


def refuse_equal_rungs(name: str, search: SearchSettings, schedule: "Schedule", own: Mapping[str, Any]) -> None:
    """Refuse rungs that end at the same evaluation: they would halve nothing.

    Raises VlmflowError with their steps. name: the search's. own: the run's own values of the searched keys.
    """
    both = schedule.fewest_stops(search), schedule.stops(own, search.rungs)
    stops = next((each for each in both if len(set(each)) < len(each)), None)
    if stops is None:
        return
    first = stops[-1] // 3 ** (search.rungs - 1)
    keys = "evaluation_steps" if schedule.checkpoint_steps <= first else "evaluation_steps and checkpoint_steps"
    rarer = f"set {keys} of runs.{search.run}.train to {first} or less, or "
    raise VlmflowError(
        f"search.{name}.rungs: {search.rungs}, but a rung ends at an evaluation, and these would end at the steps "
        f"{', '.join(map(str, stops))}: nothing was started",
        f"{rarer if first else ''}lower search.{name}.rungs",
    )


class Schedule:
    """The steps of a search's trials. rows: the number of the run's train rows. ranks: the trainers of a trial."""

    def __init__(self, train: TrainSettings, rows: int, ranks: int) -> None:
        self._ranks = ranks
        self._rows = rows
        self._train = scheduled(train, rows, ranks)

    @property
    def checkpoint_steps(self) -> int:
        """After how many steps a trial saves; it evaluates only then."""
        return self._train.save_every

    def stops(self, values: Mapping[str, Any], rungs: int) -> list[int]:
        """Return the steps after which a trial's rungs stop: evaluations', at least each rung's share of all steps.

        values: the trial's settings.
        """
        train = trained_with(self._train, values)
        total, every = Steps.of(self._rows, train, self._ranks).total, train.evaluate_every
        shares = (share_of_rung(rungs, rung) for rung in range(rungs))
        return [min(total, math.ceil(total * share / every) * every) for share in shares]

    def fewest_stops(self, search: SearchSettings) -> list[int]:
        """Return the stops of a search's trials with the fewest steps: those with the largest batches."""
        most = {
            dimension.key: max(dimension.choices) if dimension.high is None else dimension.high
            for dimension in dimensions(search.space)
            if dimension.key in BATCH
        }
        return self.stops(most, search.rungs)


def propose(
    search: SearchSettings,
    before: Study | None,
    journal_before: Path | None,
    journal: Path,
    schedule: Schedule,
    ranks: int,
    step: tuple[str, int, int],
    own: Mapping[str, Any] | None,
) -> Asked:
    """Return what a step asks, and write the journal with it.

    before, journal_before: the study and its journal after the step before; None for the first. step: the search's
    name, round and rung. own: the run's own values of the searched keys, for the first step; None in others.

    Raises VlmflowError if the study program fails.
    """
    name, number, rung = step
    if before and (before.search, before.last) != (name, step_before(search.rungs, number, rung)):
        raise VlmflowError(
            f"search {name}, round {number}, rung {rung}: the study before it is that of search {before.search}, round "
            f"{before.last[0]}, rung {before.last[1]}",
            f"remove search/{name}, and run the same command again: what is trained is kept",
        )
    slots = slots_of(search.together, number, rung)
    spent = before.gpu_hours if before else 0.0
    empty = None
    chosen: list[tuple[int, dict[str, Any], float] | None] = []
    if hours_each(search, spent, slots, ranks, 0.0) == 0:
        empty = SPENT
    elif rung == 0:
        new = new_trials(journal_before, journal, name, search, number, own)
        known = {trial.number for trial in before.trials} if before else set()
        if twice := [trial[0] for trial in new if trial and trial[0] in known]:
            raise VlmflowError(
                f"{journal_before}: it is not the journal of its study.json, which has trial {twice[0]}",
                f"remove search/{name}, and run the same command again: what is trained is kept",
            )
        chosen = [None if trial is None else (*trial, 0.0) for trial in new]
        empty = ASKED_BEFORE if None in chosen else None
    else:
        assert before is not None  # for mypy: a later rung has one
        waiting = [trial for trial in before.trials if trial.state == "waiting" and trial.round == number]
        able = ranked(waiting, search.limits, before.objective)
        others = [trial for trial in able if trial.number != OWN][: trials_of_rung(search.together, rung)]
        on = [trial for trial in able if trial.number == OWN] + others
        chosen = [(trial.number, trial.settings, trial.hours) for trial in on]
        empty = FEW if len(chosen) < slots else None
    if rung or empty == SPENT:
        assert journal_before is not None  # for mypy: the first step asks for trials
        with journal_before.open("rb") as source, whole_file(journal) as file:
            shutil.copyfileobj(source, file)
    sharing = sum(trial is not None for trial in chosen)
    trials = [
        None
        if trial is None
        else AskedTrial(
            number=trial[0],
            settings=trial[1],
            steps=schedule.stops(trial[1], search.rungs)[rung],
            hours=hours_each(search, spent, sharing, ranks, trial[2]),
        )
        for trial in chosen
    ]
    return Asked(search=name, round=number, rung=rung, trials=[*trials, *[None] * (slots - len(trials))], empty=empty)
