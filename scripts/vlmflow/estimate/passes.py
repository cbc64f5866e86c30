"""The micro-batches with which a run is estimated: as set, or those with which its smoke run will begin."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from vlmflow.config.gpus import Gpu
from vlmflow.estimate.accounts import SHARE, Needs
from vlmflow.estimate.estimate_input import EstimateInput
from vlmflow.estimate.memory import memory
from vlmflow.lengths.micro_batches import AND_AGAIN, FEWEST_TOKENS, FIRST, FORWARD_AND_BACKWARD, NUMBERS


def needs_of(inputs: EstimateInput) -> list[Needs]:
    """Return the memory of each number of tokens that the word `auto` may come to mean; [] if the run has numbers."""
    if inputs.settings.micro_batch_tokens != "auto":
        return []
    word = inputs.settings.gradient_checkpointing
    allowed = [True, False] if word == "auto" else [word]
    return [Needs(number, again, memory(_with(inputs, number, again)).total) for again in allowed for number in NUMBERS]


def as_begun(inputs: EstimateInput, needs: Sequence[Needs], gpu: Gpu | None) -> EstimateInput:
    """Return the run with its micro-batches.

    needs: see `needs_of`. gpu: its product; without one, `auto` means FIRST tokens.
    """
    set_to = inputs.settings.micro_batch_tokens
    if not needs:
        return replace(inputs, micro_batch_tokens=set_to if isinstance(set_to, int) else None)
    if gpu is None:
        return _with(inputs, FIRST, needs[0].gradient_checkpointing)
    fitting = [one for one in needs if one.memory <= SHARE * gpu.memory] or needs[:1]
    found = [_with(inputs, one.micro_batch_tokens, one.gradient_checkpointing) for one in fitting]
    return min(found, key=lambda one: (_cost(one), one.micro_batch_tokens))


def _cost(inputs: EstimateInput) -> float:
    """Return what a step costs as the smoke run will compare it (`supervisor.smoke`), but of rows as they come."""
    each = inputs.settings.per_device_batch_size * inputs.settings.gradient_accumulation_steps
    tokens = inputs.train.tokens[inputs.train.grouped(each)].sum(axis=1) if len(inputs.train) else np.zeros(1)
    counts = np.ceil(tokens / (inputs.micro_batch_tokens or 1))
    work = AND_AGAIN if inputs.mode.gradient_checkpointing else FORWARD_AND_BACKWARD
    return float((work * np.maximum(counts * FEWEST_TOKENS, tokens)).mean())


def _with(inputs: EstimateInput, number: int, again: bool) -> EstimateInput:
    return replace(inputs, micro_batch_tokens=number, mode=replace(inputs.mode, gradient_checkpointing=again))
