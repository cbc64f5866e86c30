"""Finds, by smoke runs on the GPU at hand, how large micro-batches may be and whether to compute activations again."""

import logging
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from typing import TypeVar

from vlmflow.core.errors import VlmflowError
from vlmflow.in_trainer.micro_batches import AND_AGAIN, FIRST, FORWARD_AND_BACKWARD, NUMBERS, Plan
from vlmflow.supervisor.step_plan import plan_of
from vlmflow.supervisor.train import TooLargeError
from vlmflow.swift.arguments import Passes, Training

log = logging.getLogger("vlmflow")

HALVINGS = 3
"""So often a number is halved after a GPU ran out of memory."""

STEPS = 100
"""The steps of the plan by which numbers are compared."""

Fits = Callable[[int, bool], bool]

Smoke = TypeVar("Smoke")


def find_passes(full: Training, fits: Fits | None, smoke: Callable[[Training], Smoke]) -> tuple[Training, Smoke]:
    """Return the training with the passes that its smoke run trained with, and that smoke run.

    full: its settings have `auto`. fits: whether a number of tokens fits a GPU by the estimate, with or without
    gradient_checkpointing; None without an estimate. smoke: trains the smoke run of a training, and raises
    TooLargeError if a GPU runs out of memory.

    Raises TooLargeError if the smoke run does not fit after HALVINGS.
    """
    largest = _largest_by_estimate(full, fits)
    plan = plan_of(replace(full, found=Passes(FIRST, gradient_checkpointing=True)))
    halvings = 0
    while True:
        best, *others = sorted((_fastest(plan, *choice) for choice in largest.items()), key=lambda one: one[0])
        found = replace(full, found=best[1])
        beside = (
            f"; next best: {_in_words(others[0][1])}, {others[0][0] / best[0]:.2f} times the time" if others else ""
        )
        log.info(f"auto: {_in_words(best[1])}{beside}")
        try:
            return found, smoke(found)
        except TooLargeError:
            again, number = best[1].gradient_checkpointing, best[1].micro_batch_tokens // 2
            largest[again] = number
            if number < NUMBERS[0]:
                del largest[again]
            if halvings == HALVINGS or not largest:
                raise
            halvings += 1
            log.warning(f"auto: {_in_words(best[1])} did not fit the GPU; trying less")


def _in_words(passes: Passes) -> str:
    again = "with" if passes.gradient_checkpointing else "without"
    return f"micro-batches of {passes.micro_batch_tokens:,} tokens {again} gradient_checkpointing"


def _largest_by_estimate(full: Training, fits: Fits | None) -> dict[bool, int]:
    """Return the largest number that fits, for each allowed value of gradient_checkpointing."""
    word = full.settings.gradient_checkpointing
    allowed = [True, False] if word == "auto" else [bool(word)]
    if fits is None:
        return {allowed[0]: FIRST}
    found = {}
    for again in allowed:
        fitting = [number for number in NUMBERS if fits(number, again)]
        if fitting or again is allowed[0]:
            found[again] = max(fitting, default=NUMBERS[0])
    return found


def _fastest(plan: Plan, again: bool, most: int) -> tuple[float, Passes]:
    """Return the number up to `most` with the least predicted time, the smallest of equals; and that time.

    plan: of the full run, with any number.
    """
    work = AND_AGAIN if again else FORWARD_AND_BACKWARD
    tried = []
    for number in [one for one in NUMBERS if one < most] + [most]:
        planner = replace(plan.planner, most=number)
        steps = map(planner.step, islice(plan.rows(0), STEPS))
        cost = sum(planner.cost(together) for step in steps for together in zip(*step, strict=True))
        tried.append((float(cost * work), Passes(number, again)))
    return min(tried, key=lambda one: one[0])


def gpu_memory() -> int:
    """Return the bytes of this machine's first GPU. A process of its own asks: the driver keeps memory for each.

    Raises VlmflowError if there is none.
    """
    code = "import torch; print(torch.cuda.get_device_properties(0).total_memory)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        raise VlmflowError(
            f"no GPU that PyTorch can use: {done.stderr.strip().rpartition(chr(10))[2]}",
            "make doctor says what a machine lacks; or set runs.NAME.device: cpu",
        )
    return int(done.stdout)
