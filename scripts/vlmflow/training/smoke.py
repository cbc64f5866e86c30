"""The short training before the full one: the longest rows, which determine memory, and a sample."""

import hashlib
import logging
import math
import random
from dataclasses import dataclass, replace
from pathlib import Path

from vlmflow.config.run_settings import SmokeSettings
from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import whole_file
from vlmflow.core.printable import counted
from vlmflow.lengths.count import RowLength, lines_of
from vlmflow.swift.arguments import Training
from vlmflow.training.steps import Steps, side_by_side

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
    longest = min(smoke.longest, steps * rows_per_step(full))
    log.info(f"the full run has at most {steps} steps: the smoke run takes {steps}, not smoke.steps = {smoke.steps}")
    return smoke.model_copy(update={"steps": steps, "longest": longest})


def rows_per_step(training: Training) -> int:
    """Return the rows of one optimizer step, over all ranks."""
    settings = training.settings
    side = side_by_side(settings, training.ranks)
    return side * settings.per_device_batch_size * settings.gradient_accumulation_steps


def choose_rows(train: list[RowLength], val: list[RowLength], full: Training, smoke: SmokeSettings) -> SmokeRows:
    """Return the longest rows of both splits by tokens, and a sample of the train split, drawn with the run's seed.

    train, val: the lengths of all rows. The steps limit the sample: each chosen row is trained on at least once.

    Raises VlmflowError if the steps are not enough for the longest rows alone.
    """
    settings = full.settings
    each = rows_per_step(full)
    room = smoke.steps * each - smoke.longest
    if room < 0:
        raise VlmflowError(
            f"smoke.steps = {smoke.steps} steps of {counted(each, 'row')} do not reach smoke.longest = {smoke.longest}",
            f"set smoke.steps to {math.ceil(smoke.longest / each)} or more",
        )
    by_length = sorted(train, key=_longest_first)
    others = by_length[smoke.longest :]
    sample = random.Random(settings.seed).sample(others, min(smoke.sample, room, len(others)))  # noqa: S311
    return SmokeRows(by_length[: smoke.longest] + sample, sorted(val, key=_longest_first)[: smoke.longest])


def _longest_first(row: RowLength) -> tuple[int, int]:
    return -row.tokens, row.start


def smoke_training(full: Training, chosen: SmokeRows, smoke: SmokeSettings, folder: Path) -> Training:
    """Return the full run's training reduced to the smoke run: the same settings, fewer rows and steps.

    folder: the rows are written below it, in a folder named after their digest.
    """
    lines = {"train": lines_of(full.data.train, chosen.train), "val": lines_of(full.data.val, chosen.val)}
    digest = hashlib.sha256(b"\0".join(lines.values())).hexdigest()
    files = {split: folder / "rows" / digest[:16] / f"{split}.jsonl" for split in lines}
    for split, file in files.items():
        with whole_file(file) as target:
            target.write(lines[split])
    return replace(
        full,
        data=replace(full.data, train=files["train"], val=files["val"], digest=digest + full.data.digest),
        settings=full.settings.model_copy(
            update={
                "max_steps": smoke.steps,
                "checkpoint_steps": (smoke.steps + 1) // 2,
                "evaluation_steps": (smoke.steps + 1) // 2,
                "early_stop_after": None,
            }
        ),
    )
