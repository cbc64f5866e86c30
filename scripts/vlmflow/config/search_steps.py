"""The steps of a search: its rounds, each in rungs, and how many trials each has."""

import math
from collections.abc import Iterator

from vlmflow.config.search_settings import SearchSettings


def trials_of_rung(together: int, rung: int) -> int:
    """Return how many trials of a round a rung has: a third, rounded up, of those of the rung before."""
    return together if rung == 0 else math.ceil(trials_of_rung(together, rung - 1) / 3)


def slots_of(together: int, number: int, rung: int) -> int:
    """Return how many trials a step has: those of its rung, and in the first round the run's own settings."""
    return trials_of_rung(together, rung) + (number == 0)


def share_of_rung(rungs: int, rung: int) -> float:
    """Return the share of the whole training after which a rung stops its trials."""
    return float(1 / 3 ** (rungs - 1 - rung))


def steps_of(search: SearchSettings) -> Iterator[tuple[int, int]]:
    """Yield all steps of a search, in their order: round and rung."""
    for number in range(search.rounds):
        for rung in range(search.rungs):
            yield number, rung


def step_before(rungs: int, number: int, rung: int) -> tuple[int, int] | None:
    """Return the step before one; None before the first."""
    if rung:
        return number, rung - 1
    return (number - 1, rungs - 1) if number else None
