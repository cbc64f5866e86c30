"""The micro-batches with which a run is estimated: as set, or those with which its smoke run will begin."""

from collections.abc import Sequence
from dataclasses import replace

from vlmflow.config.gpus import Gpu
from vlmflow.estimate.accounts import Needs
from vlmflow.estimate.case import Case
from vlmflow.estimate.memory import memory
from vlmflow.estimate.times import times

NUMBERS = [1024 * 2**power for power in range(8)]
"""The tokens that a micro-batch may have where the smoke run finds the number: 1,024 to 131,072."""

FIRST = 8192
"""The number to begin with where no estimate of the memory exists."""

SHARE = 0.85
"""The share of a GPU's memory that the first smoke run may take by the estimate."""


def needs_of(case: Case) -> list[Needs]:
    """Return the memory of each number of tokens that the word `auto` may come to mean; [] if the run has numbers."""
    if case.settings.micro_batch_tokens != "auto":
        return []
    word = case.settings.gradient_checkpointing
    allowed = [True, False] if word == "auto" else [word]
    return [Needs(number, again, memory(_with(case, number, again)).total) for again in allowed for number in NUMBERS]


def as_begun(case: Case, needs: Sequence[Needs], gpu: Gpu | None) -> Case:
    """Return the run with its micro-batches.

    needs: see `needs_of`. gpu: its product; without one, `auto` means FIRST tokens.
    """
    set_to = case.settings.micro_batch_tokens
    if not needs:
        return replace(case, micro_batch_tokens=set_to if isinstance(set_to, int) else None)
    if gpu is None:
        return _with(case, FIRST, needs[0].gradient_checkpointing)
    fitting = [one for one in needs if one.memory <= SHARE * gpu.memory] or needs[:1]
    cases = [_with(case, one.micro_batch_tokens, one.gradient_checkpointing) for one in fitting]
    return min(cases, key=lambda one: (round(times(one, gpu, fast=True).hours, 3), one.micro_batch_tokens))


def _with(case: Case, number: int, again: bool) -> Case:
    return replace(case, micro_batch_tokens=number, way=replace(case.way, gradient_checkpointing=again))
