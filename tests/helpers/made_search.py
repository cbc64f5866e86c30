"""Whole searches without a training: a function answers each trial, everything else is the workflow's own code."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vlmflow.config.run_settings import TrainSettings
from vlmflow.config.search_settings import SearchLimits, SearchSettings, dimensions, step_before, steps_of
from vlmflow.core.account import read_account, write_account
from vlmflow.search.journal import tell
from vlmflow.search.propose import Schedule, propose
from vlmflow.search.study import Asked, AskedTrial, Judged, Study, TrialResult

TRAIN = TrainSettings(max_steps=90, checkpoint_steps=10, evaluation_steps=10)
LENGTHS = [100] * 64
OWN_RATE = 5e-3
"""The run's own learning rate in these searches."""

Answer = Callable[[AskedTrial], TrialResult]


def result(asked: AskedTrial, value: float | None, **other: Any) -> TrialResult:
    """Return a trial's result, one that reached its step unless `other` says otherwise."""
    curve = [] if value is None else [(asked.steps, value)]
    fields = {"state": "done", "reason": None, "steps": asked.steps, "mem_mb": 100.0, "hours": 1.0, "gpu_hours": 1.0}
    return TrialResult(
        **{"number": asked.number, "settings": asked.settings, "value": value, "curve": curve} | fields | other
    )


def best_unjudged(study: Study, limits: SearchLimits) -> Judged:
    """Return what a search's judgement would be if its best trial won."""
    best = study.best(limits)
    number = best.number if best else None
    return Judged(
        search=study.search,
        study="0" * 64,
        best=number,
        chosen=number,
        probably=number,
        compared=None,
        chose_nothing=None,
        sentence=f"Trial {number} is said to win.",
    )


NOTHING = TrialResult(
    number=None,
    settings={},
    state="empty",
    reason="nothing was asked",
    steps=0,
    value=None,
    mem_mb=None,
    hours=0,
    gpu_hours=0,
    curve=[],
)


def searched(
    folder: Path,
    search: SearchSettings,
    answer: Answer,
    last: tuple[int, int] | None = None,
    own: dict[str, Any] | None = None,
) -> Study:
    """Run a search in a folder, through the program of its environment, up to its last step; return its account.

    answer: gives the result of what a slot asks. last: round and rung after which to end. own: the run's own settings;
    None for OWN_RATE, and the first of all other values.
    """
    study: Study | None = None
    own = own or {one.key: one.first for one in dimensions(search.space)} | (
        {"learning_rate": OWN_RATE} if "learning_rate" in search.space else {}
    )
    for number, rung in steps_of(search):
        here = folder / "search" / "s" / str(number) / str(rung)
        before = step_before(search.rungs, number, rung)
        journal = folder / "search" / "s" / "/".join(map(str, before)) / "study.journal" if before else None
        schedule = Schedule(TRAIN, len(LENGTHS), 1)
        first = own if before is None else None
        step = ("s", number, rung)
        asked = propose(search, study, journal, here / "asked.journal", schedule, 1, step, first)
        write_account(here / "asked.json", asked)
        results = {}
        for slot, trial in enumerate(asked.trials):
            file = here / f"{slot}.json"
            write_account(file, NOTHING if trial is None else answer(trial))
            results[file] = read_account(file, TrialResult)
        how = search.objective, search.rungs, search.limits
        study = tell(asked, results, study, (here / "asked.journal", here / "study.journal"), how)
        write_account(here / "study.json", study)
        study = read_account(here / "study.json", Study)
        if (number, rung) == last:
            break
    assert study is not None
    return study


def asked_in(folder: Path, number: int, rung: int = 0) -> Asked:
    """Return what a step of such a search asked."""
    return read_account(folder / "search" / "s" / str(number) / str(rung) / "asked.json", Asked)


def all_asked(folder: Path) -> dict[str, Any]:
    """Return the content of all accounts of what was asked, by place."""
    files = sorted((folder / "search").rglob("asked.json"))
    return {str(file.relative_to(folder)): json.loads(file.read_text()) for file in files}
