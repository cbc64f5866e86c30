"""The short training before the full one: the longest rows, which determine memory, and a sample.

Where the settings say `auto`, smoke runs on the GPU at hand find how large micro-batches may be and whether to compute
activations again.
"""

import hashlib
import logging
import math
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import TypeVar

import msgspec

from vlmflow.config.run_settings import SmokeSettings
from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import whole_file
from vlmflow.core.printable import counted
from vlmflow.lengths.count import RowLength, lines_of
from vlmflow.lengths.micro_batches import AND_AGAIN, FIRST, FORWARD_AND_BACKWARD, NUMBERS, Plan
from vlmflow.lengths.steps import Steps
from vlmflow.supervisor.plan import described_epochs, plan_of
from vlmflow.supervisor.train import TooLargeError
from vlmflow.swift.arguments import Passes, Training

log = logging.getLogger("vlmflow")

FEWEST_STEPS = 4
"""The fewest steps of a smoke run."""


@dataclass(frozen=True)
class SmokeRows:
    """The rows that a smoke run trains on (`train`) and evaluates (`val`)."""

    train: list[RowLength]
    val: list[RowLength]


def capped(smoke: SmokeSettings, full: Training, rows: int) -> SmokeSettings:
    """Return the smoke run's settings, with at most as many steps as the full run.

    It keeps FEWEST_STEPS: fewer do not show whether the loss falls. rows: those of the full run's train split.
    """
    steps = max(FEWEST_STEPS, Steps.of(rows, full.settings, full.ranks).total)
    if steps >= smoke.steps:
        return smoke
    longest = min(smoke.longest, steps * full.rows_per_step)
    log.info(f"the full run has at most {steps} steps: the smoke run takes {steps}, not smoke.steps = {smoke.steps}")
    return smoke.model_copy(update={"steps": steps, "longest": longest})


def choose_rows(train: list[RowLength], val: list[RowLength], full: Training, smoke: SmokeSettings) -> SmokeRows:
    """Return the longest rows of both splits by tokens, and a sample of the train split, drawn with the run's seed.

    train, val: the lengths of all rows. The steps limit the sample: each chosen row is trained on at least once.
    With micro-batches, the first steps of the smoke run are those of the full run that need the most memory.

    Raises VlmflowError if the steps are not enough for the longest rows alone.
    """
    settings = full.settings
    each = full.rows_per_step
    room = smoke.steps * each - smoke.longest
    if room < 0:
        raise VlmflowError(
            f"smoke.steps = {smoke.steps} steps of {counted(each, 'row')} do not reach smoke.longest = {smoke.longest}",
            f"set smoke.steps to {math.ceil(smoke.longest / each)} or more",
        )
    by_length = sorted(train, key=_longest_first)
    others = by_length[smoke.longest :]
    sample = random.Random(settings.seed).sample(others, min(smoke.sample, room, len(others)))  # noqa: S311
    chosen = by_length[: smoke.longest] + sample
    if full.micro_batch_tokens is not None:
        chosen = _dearest_steps_first(train, chosen, full, smoke.steps)
    return SmokeRows(chosen, sorted(val, key=_longest_first)[: smoke.longest])


def _dearest_steps_first(
    train: list[RowLength], others: list[RowLength], full: Training, steps: int
) -> list[RowLength]:
    """Return the rows of the dearest steps of the full run, then others, in the order of a file.

    The order is such that the smoke run's sampler draws these steps first; a plan depends on lengths alone, so it cuts
    them into the same micro-batches. Steps of two epochs may share rows, which then stand there twice.
    """
    plan = plan_of(full)
    dearest: dict[str, tuple[int, list[int]]] = {}
    for rows in chain.from_iterable(map(plan.rows, described_epochs(full, plan))):
        for batch in (batch for batches in plan.planner.step(rows) for batch in batches):
            needs = {
                "tokens": plan.planner.tokens(batch),
                "trained tokens": sum(train[row].trained_tokens for row in batch),
                "picture tokens": sum(train[row].picture_tokens for row in batch),
            }
            for what, need in needs.items():
                if need > dearest.get(what, (-1, []))[0]:
                    dearest[what] = need, rows
    once = {tuple(sorted(rows)) for _, rows in dearest.values()}
    whole_first = sorted(once, key=lambda rows: (-len(rows), rows))
    first = [row for rows in whole_first for row in rows]
    starts = {train[row].start for row in first}
    wanted = [train[row] for row in first] + [row for row in others if row.start not in starts]
    wanted = wanted[: steps * full.rows_per_step]
    smaller = replace(plan, planner=replace(plan.planner, sizes=[0] * len(wanted)))
    drawn = [row for rows in smaller.rows(0) for row in rows]
    placed = sorted(zip(drawn, wanted, strict=False), key=lambda place: place[0])
    return [row for _, row in placed]


def _longest_first(row: RowLength) -> tuple[int, int]:
    return -row.tokens, row.start


def smoke_training(full: Training, chosen: SmokeRows, smoke: SmokeSettings, folder: Path) -> Training:
    """Return the full run's training reduced to the smoke run: the same settings, fewer rows and steps.

    folder: the rows are written below it, in a folder named after their digest.
    """
    lines = {"train": lines_of(full.data.train, chosen.train), "val": lines_of(full.data.val, chosen.val)}
    digest = hashlib.sha256(b"\0".join(lines.values())).hexdigest()
    files = {split: folder / "rows" / digest[:16] / f"{split}.jsonl" for split in lines}
    data = replace(full.data, train=files["train"], val=files["val"], digest=digest + full.data.digest)
    for split, file in files.items():
        with whole_file(file) as target, whole_file(data.lengths(split)) as lengths:
            target.write(lines[split])
            lengths.writelines(msgspec.json.encode(row) + b"\n" for row in getattr(chosen, split))
    return replace(
        full,
        data=data,
        found=None,
        settings=full.settings.model_copy(
            update={
                "max_steps": smoke.steps,
                "checkpoint_steps": (smoke.steps + 1) // 2,
                "evaluation_steps": (smoke.steps + 1) // 2,
                "early_stop_after": None,
                "micro_batch_tokens": full.micro_batch_tokens,
                "gradient_checkpointing": full.gradient_checkpointing,
            }
        ),
    )


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
