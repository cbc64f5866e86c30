"""How long a step takes, from the steps of a training: a part for each step, and a part for each token.

One mean speed is wrong for rows of another length: a smoke run has the longest rows, and the time of a step does not
grow in proportion to its tokens.
"""

import statistics
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise

from msgspec import UNSET

from vlmflow.in_trainer.events import Event, Log
from vlmflow.supervisor.accounts import Pace

Timed = tuple[int, float]
"""The tokens of a step or an evaluation, and the seconds that it took."""

WARM_UP = 1
"""The first steps of a session, which also load kernels and reserve memory, do not count."""


def timed_steps(events: Sequence[Event]) -> list[Timed]:
    """Return tokens and seconds of each step, without the first of a session and those during which it saved."""
    steps = []
    since_begin = 0
    for before, event in pairwise(events):
        if not isinstance(before, Log):
            since_begin = 0
        if isinstance(event, Log) and event.loss is not UNSET:
            since_begin += 1
            if since_begin > WARM_UP and isinstance(before, Log) and before.loss is not UNSET:
                steps.append((event.tokens - before.tokens, event.time - before.time))
    return steps


def evaluation_seconds(events: Sequence[Event]) -> Iterator[float]:
    """Yield the seconds of each evaluation after a step."""
    for before, event in pairwise(events):
        if isinstance(before, Log) and isinstance(event, Log) and event.eval_loss is not UNSET:
            yield event.time - before.time


def fit(steps: Sequence[Timed]) -> Pace | None:
    """Return the line through the times of some steps; None without steps.

    The slope is the median of those between two steps (Theil and Sen), so that a single slow step does not count; it
    lies between that of a time that does not depend on tokens, and of one in proportion to them.
    """
    if not steps:
        return None
    tokens, seconds = (statistics.fmean(values) for values in zip(*steps, strict=True))
    slopes = [(late - early) / (more - few) for (few, early), (more, late) in combinations(steps, 2) if more != few]
    proportional = seconds / tokens if tokens else 0.0
    slope = min(max(statistics.median(slopes), 0.0), proportional) if slopes else proportional
    rest = statistics.median(took - slope * count for count, took in steps)
    return Pace(step_seconds=max(rest, 0.0), token_seconds=slope, steps=len(steps))
