"""The account of a search (`study.json`): every trial's results so far. It needs no Optuna to read."""

import math
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from vlmflow.config.search_settings import Objective, SearchLimits
from vlmflow.core.errors import VlmflowError
from vlmflow.search.accounts import Amount, Asked, TrialResult
from vlmflow.search.objectives import cost

TrialState = Literal["done", "failed", "stopped", "waiting", "left"]
"""done: trained to its end. failed, stopped: as its last result. waiting: it finished a rung, and may go on. left: it
finished a rung, and others went on."""

STATES: dict[TrialState, str] = {
    "done": "trained to its end",
    "failed": "failed",
    "stopped": "stopped: its hours were over",
    "waiting": "waits for the next rung",
    "left": "did not go on",
}
"""The states of a trial, for people."""


class StudyTrial(msgspec.Struct, frozen=True, kw_only=True):
    """One trial.

    round: in which it was chosen. rung: the last that it trained in. value: the objective at `steps`, null without one.
    mem_mb: the highest of all rungs. hours, gpu_hours: of all rungs together. curve: steps with validation losses.
    rungs: the step that it reached and its value, by rung.
    """

    number: int
    round: int
    rung: int
    settings: dict[str, Any]
    state: TrialState
    reason: str | None
    steps: int
    value: float | None
    mem_mb: float | None
    hours: Amount
    gpu_hours: Amount
    curve: list[tuple[int, float]]
    rungs: list[tuple[int, float]] = []

    def above(self, limits: SearchLimits) -> dict[str, float]:
        """Return by how much it is above each limit that is set, zero or less if it is not; 0 for an unknown figure."""
        found = {"mem_mb": (self.mem_mb, limits.mem_mb), "hours": (self.hours, limits.hours)}
        return {
            name: 0.0 if value is None else value - most for name, (value, most) in found.items() if most is not None
        }

    def within(self, limits: SearchLimits) -> bool:
        """Return whether it is above no limit."""
        return all(value <= 0 for value in self.above(limits).values())


class EmptySlots(msgspec.Struct, frozen=True):
    """Slots of a step that asked nothing: how many, and why."""

    round: int
    rung: int
    slots: int
    reason: str


class Study(msgspec.Struct, frozen=True, kw_only=True):
    """All results of a search so far.

    last: round and rung of the step that was told last. importances: by key, how well it tells the best results from
    all (PED-ANOVA; they add up to 1); null with too few results. digests: SHA-256 of every result, by
    ROUND/RUNG/SLOT.json.
    """

    search: str
    objective: Objective
    last: tuple[int, int]
    trials: list[StudyTrial]
    empty: list[EmptySlots]
    importances: dict[str, float] | None
    digests: dict[str, str]

    @property
    def gpu_hours(self) -> float:
        """What all trials took together."""
        return sum(trial.gpu_hours for trial in self.trials)

    def missing_from(self, before: "Study | None") -> list[StudyTrial]:
        """Return the trials whose results an earlier account of the same search does not have."""
        known = before.trials if before else []
        return [trial for trial in self.trials if trial not in known]

    def best(self, limits: SearchLimits) -> StudyTrial | None:
        """Return the best of the trials that trained to their end within the limits; None if there is none."""
        done = [trial for trial in self.trials if trial.state == "done"]
        return next(iter(ranked(done, limits, self.objective)), None)

    def trial(self, number: int) -> StudyTrial:
        """Return the trial with a number; raises VlmflowError if it has none."""
        for trial in self.trials:
            if trial.number == number:
                return trial
        raise VlmflowError(
            f"search/{self.search}: it has no trial {number}",
            f"remove search/{self.search}, and run the same command again",
        )


def ranked(trials: Sequence[StudyTrial], limits: SearchLimits, objective: Objective) -> list[StudyTrial]:
    """Return the trials that have a value and are within the limits, the best first, older ones first among equals."""
    able = [
        (cost(objective, trial.value), trial) for trial in trials if trial.value is not None and trial.within(limits)
    ]
    return [trial for _, trial in sorted(able, key=lambda one: (one[0], one[1].number))]


def with_step(
    before: Study | None, asked: Asked, results: Sequence[TrialResult], rungs: int, limits: SearchLimits
) -> list[StudyTrial]:
    """Return all trials of a study after one more step, by number.

    before: the study so far. results: those of the step's slots, in their order. rungs, limits: of the search.

    Raises VlmflowError if a result is not of what was asked.
    """
    trials = {trial.number: trial for trial in before.trials} if before else {}
    for slot, (wanted, result) in enumerate(zip(asked.trials, results, strict=True)):
        if wanted is None:
            continue
        later = result.steps > wanted.steps  # fewer are no other step's: a training may end early
        if (result.number, result.settings) != (wanted.number, wanted.settings) or later:
            raise VlmflowError(
                f"search {asked.search}, round {asked.round}, rung {asked.rung}: {slot}.json is the result of trial "
                f"{result.number} at step {result.steps}, but trial {wanted.number} was asked, to step {wanted.steps}",
                f"remove search/{asked.search}/{asked.round}/{asked.rung}/{slot}.json, and run the same command again",
            )
        trials[wanted.number] = _after(trials.get(wanted.number), asked, result, last=asked.rung == rungs - 1)
    for number, trial in trials.items():
        if trial.state == "waiting" and (trial.round, trial.rung) != (asked.round, asked.rung):
            why = "not among the best third of its rung" if any(asked.trials) else asked.empty
            if not trial.within(limits):
                why = "above a limit"
            trials[number] = msgspec.structs.replace(trial, state="left", reason=why)
    return [trials[number] for number in sorted(trials)]


def _after(trial: StudyTrial | None, asked: Asked, result: TrialResult, *, last: bool) -> StudyTrial:
    """Return a trial after one more result. trial: it so far; None if it is new. last: whether it was the last rung."""
    assert result.number is not None
    value = result.value if result.value is not None and math.isfinite(result.value) else None
    state: TrialState = "failed"
    reason = result.reason
    if result.state == "done" and value is None:
        reason = "its value is no finite number"
    elif result.state == "done":
        state = "done" if last else "waiting"
    elif result.state == "stopped":
        state = "stopped"
    known = [mem for mem in (trial.mem_mb if trial else None, result.mem_mb) if mem is not None]
    reached = [(result.steps, value)] if value is not None else []
    return StudyTrial(
        number=result.number,
        round=asked.round,
        rung=asked.rung,
        settings=result.settings,
        state=state,
        reason=reason,
        steps=result.steps,
        value=value,
        mem_mb=max(known, default=None),
        hours=(trial.hours if trial else 0) + result.hours,
        gpu_hours=(trial.gpu_hours if trial else 0) + result.gpu_hours,
        # A result may have the curve from the start, or only its own rung's part.
        curve=sorted((dict(trial.curve if trial else []) | dict(result.curve)).items()),
        rungs=[*(trial.rungs if trial else []), *reached],
    )
