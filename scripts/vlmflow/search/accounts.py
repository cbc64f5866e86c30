"""The accounts of a search: what a step asks of its trials (`asked.json`), and each trial's result (`SLOT.json`)."""

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from vlmflow.core.account import read_account
from vlmflow.core.errors import VlmflowError
from vlmflow.core.printable import counted
from vlmflow.evaluation.accounts import Compared

OWN = 0
"""The number of the trial with the run's own settings. It trains to its end, whatever the others give."""

Amount = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
"""A number that adds up with others: never negative, never NaN."""

State = Literal["done", "failed", "stopped", "empty"]
"""How a trial of a step ended. done: it reached its step. failed: its training cannot go on with these settings.
stopped: its hours were over before its step. empty: nothing was asked of this slot."""


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
    found = read_account(file, Asked)
    numbers = [trial.number for trial in found.trials if trial]
    here = (found.search, str(found.round), str(found.rung)) == file.parts[-4:-1]
    if not here or not found.trials or len(set(numbers)) < len(numbers):
        raise VlmflowError(
            f"{file}: it is no account of this step: search {found.search!r}, round {found.round}, rung {found.rung}, "
            f"trials {numbers} in {counted(len(found.trials), 'slot')}",
            f"remove {file}, and run the same command again",
        )
    return found


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
    whose settings `best.yaml` has: `best`, or OWN if it is not shown to be better. Both are null if no trial trained to
    its end within the limits. compared: what the objective stands for, of `best` (as tuned) and OWN (as base) on the
    same rows; null if one of them is no result, or both are one trial. chose_nothing: whether these rows are of the
    half of val that judges; otherwise val chose both trials and judged them. sentence: for people.
    """

    search: str
    study: str
    best: int | None
    chosen: int | None
    compared: Compared | None
    chose_nothing: bool | None
    sentence: str
