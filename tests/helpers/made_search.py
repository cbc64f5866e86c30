"""Whole searches without a training: a function answers each trial, everything else is the workflow's own code."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vlmflow.config.run_settings import TrainSettings
from vlmflow.config.search_settings import SearchSettings, step_before, steps_of
from vlmflow.core.account import read_account, write_account
from vlmflow.search.accounts import Asked, AskedTrial, TrialResult
from vlmflow.search.propose import Schedule, propose
from vlmflow.search.study import Study
from vlmflow.search.tell import tell

TRAIN = TrainSettings(max_steps=90, checkpoint_steps=10, evaluation_steps=10)
LENGTHS = [100] * 64

Answer = Callable[[AskedTrial], TrialResult]


def result(asked: AskedTrial, value: float | None, **other: Any) -> TrialResult:
    """Return a trial's result, one that reached its step unless `other` says otherwise."""
    curve = [] if value is None else [(asked.steps, value)]
    fields = {"state": "done", "reason": None, "steps": asked.steps, "mem_mb": 100.0, "hours": 1.0, "gpu_hours": 1.0}
    return TrialResult(
        **{"number": asked.number, "settings": asked.settings, "value": value, "curve": curve} | fields | other
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


def searched(folder: Path, search: SearchSettings, answer: Answer, last: tuple[int, int] | None = None) -> Study:
    """Run a search in a folder, through the program of its environment, up to its last step; return its account.

    answer: gives the result of what a slot asks. last: round and rung after which to end.
    """
    study: Study | None = None
    for number, rung in steps_of(search):
        here = folder / "search" / "s" / str(number) / str(rung)
        before = step_before(search.rungs, number, rung)
        journal = folder / "search" / "s" / "/".join(map(str, before)) / "study.journal" if before else None
        schedule = Schedule(TRAIN, LENGTHS, 1)
        asked = propose(search, study, journal, here / "asked.journal", schedule, 1, step=("s", number, rung))
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
