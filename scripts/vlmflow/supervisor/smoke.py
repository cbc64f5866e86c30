"""The short training before the full one: the longest rows, which determine memory, and a sample."""

import hashlib
import logging
import math
import random
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import msgspec

from vlmflow.config.run_settings import SmokeSettings
from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import whole_file
from vlmflow.core.printable import counted
from vlmflow.lengths.count import RowLength, lines_of
from vlmflow.supervisor.step_plan import described_epochs, plan_of
from vlmflow.supervisor.steps import Steps
from vlmflow.swift.arguments import Training

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
