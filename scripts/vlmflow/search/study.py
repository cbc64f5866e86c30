"""The accounts of a search: what a step asks, each trial's result, and the study.

They are `asked.json`, `SLOT.json` and `study.json`, which has every trial's results so far, and need no Optuna. An
objective says what its value is called, and which of two is better.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from vlmflow.config.search_settings import Objective, SearchLimits
from vlmflow.core.account import read_account
from vlmflow.core.errors import VlmflowError, counted
from vlmflow.evaluation.report import Compared

OWN = 0
"""The number of the trial with the run's own settings. It trains to its end, whatever the others give."""

Amount = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
"""A number that adds up with others: never negative, never NaN."""

State = Literal["done", "failed", "stopped", "empty"]
"""How a trial of a step ended. done: it reached its step. failed: its training cannot go on with these settings.
stopped: its hours were over before its step. empty: nothing was asked of this slot."""


TrialState = Literal["done", "failed", "stopped", "waiting", "left"]
"""done: trained to its end. failed, stopped: as its last result. waiting: it finished a rung, and may go on. left: it
finished a rung, and others went on."""


class AskedTrial(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of one trial in one step.

    number: the trial's in its study, the same in all rungs. settings: values by key of `search.NAME.space`
    (`lora.rank`). steps: the optimizer step after which it stops, an evaluation's. hours: how long it may train in this
    step; null without a limit.
    """

    number: Annotated[int, msgspec.Meta(ge=0)]
    settings: dict[str, Any]
    steps: int
    hours: Amount | None


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What one step asks (`search/NAME/ROUND/RUNG/asked.json`).

    trials: by slot; null for an empty one. empty: why there are empty ones (too few survivors, or nothing is left of
    the budget); null if there is none.
    """

    search: str
    round: int
    rung: int
    trials: list[AskedTrial | None]
    empty: str | None = None


def read_asked(file: Path) -> Asked:
    """Read what a step asks (search/NAME/ROUND/RUNG/asked.json).

    Raises VlmflowError if it is not the account of that step, or asks of one trial twice.
    """
    plan = read_account(file, Asked)
    numbers = [trial.number for trial in plan.trials if trial]
    here = (plan.search, str(plan.round), str(plan.rung)) == file.parts[-4:-1]
    if not here or not plan.trials or len(set(numbers)) < len(numbers):
        raise VlmflowError(
            f"{file}: it is no account of this step: search {plan.search!r}, round {plan.round}, rung {plan.rung}, "
            f"trials {numbers} in {counted(len(plan.trials), 'slot')}",
            f"remove {file}, and run the same command again",
        )
    return plan


class TrialResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one trial of a step gave (`search/NAME/ROUND/RUNG/SLOT.json`).

    number, settings: as asked; null and {} for an empty slot. reason: why it did not reach its step; null if it is
    done. steps: the step that it reached. value: the objective there; null without one. mem_mb:
    peak memory in MB of a GPU, or of a trainer's process on the CPU; null if unknown. hours: that it took in this step,
    from each start of its trainers to their end, and to be judged; gpu_hours: these times the trainers. curve: steps of
    its training so far, each with its validation loss.
    """

    number: int | None
    settings: dict[str, Any]
    state: State
    reason: str | None
    steps: int
    value: float | None
    mem_mb: Amount | None
    hours: Amount
    gpu_hours: Amount
    curve: list[tuple[int, float]]


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the best trial against the run's own settings (`search/NAME/judged.json`).

    study: SHA-256 of the study's account. best: the number of the trial with the best value. chosen: that of the trial
    whose settings `best.yaml` has: `best`, or OWN if it is not shown to be better. probably: the same for
    `probably.yaml`: `best`, or OWN if it is not better on the compared rows. All three are null if no trial trained to
    its end within the limits. compared: what the objective stands for, of `best` (as tuned) and OWN (as base) on the
    same rows; null if one of them is no result, or both are one trial. chose_nothing: whether these rows are of the
    half of val that judges; otherwise val chose both trials and judged them. sentence: for people.
    """

    search: str
    study: str
    best: int | None
    chosen: int | None
    probably: int | None
    compared: Compared | None
    chose_nothing: bool | None
    sentence: str


NAMES: dict[Objective, str] = {"eval_loss": "validation loss", "uses_feedback": "use of feedback"}

MEANINGS: dict[Objective, str] = {
    "eval_loss": "validation loss in nats per token, the lower the better",
    "uses_feedback": "use of feedback, the higher the better: in how many rows of val its own feedback makes the right "
    "answer likelier than another row's does",
}


def cost(objective: Objective, value: float) -> float:
    """Return what a search makes as low as possible. value: the objective's; shares are the better the higher."""
    return value if objective == "eval_loss" else -value


def shown(objective: Objective, value: float) -> str:
    """Return a value for people."""
    return f"{value:.5g}" if objective == "eval_loss" else f"{value:.1%}"


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
        figures = {"mem_mb": (self.mem_mb, limits.mem_mb), "hours": (self.hours, limits.hours)}
        return {
            name: 0.0 if value is None else value - most for name, (value, most) in figures.items() if most is not None
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
    return [trial for _, trial in sorted(able, key=lambda pair: (pair[0], pair[1].number))]


def with_step(
    before: Study | None, plan: Asked, results: Sequence[TrialResult], rungs: int, limits: SearchLimits
) -> list[StudyTrial]:
    """Return all trials of a study after one more step, by number.

    before: the study so far. results: those of the step's slots, in their order. rungs, limits: of the search.

    Raises VlmflowError if a result is not of what was asked.
    """
    trials = {trial.number: trial for trial in before.trials} if before else {}
    for slot, (wanted, result) in enumerate(zip(plan.trials, results, strict=True)):
        if wanted is None:
            continue
        later = result.steps > wanted.steps  # fewer are no other step's: a training may end early
        if (result.number, result.settings) != (wanted.number, wanted.settings) or later:
            raise VlmflowError(
                f"search {plan.search}, round {plan.round}, rung {plan.rung}: {slot}.json is the result of trial "
                f"{result.number} at step {result.steps}, but trial {wanted.number} was asked, to step {wanted.steps}",
                f"remove search/{plan.search}/{plan.round}/{plan.rung}/{slot}.json, and run the same command again",
            )
        trials[wanted.number] = _after(trials.get(wanted.number), plan, result, last=plan.rung == rungs - 1)
    for number, trial in trials.items():
        if trial.state == "waiting" and (trial.round, trial.rung) != (plan.round, plan.rung):
            why = "not among the best third of its rung" if any(plan.trials) else plan.empty
            if not trial.within(limits):
                why = "above a limit"
            trials[number] = msgspec.structs.replace(trial, state="left", reason=why)
    return [trials[number] for number in sorted(trials)]


def _after(trial: StudyTrial | None, plan: Asked, result: TrialResult, *, last: bool) -> StudyTrial:
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
        round=plan.round,
        rung=plan.rung,
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
