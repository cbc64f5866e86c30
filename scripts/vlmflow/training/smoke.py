"""The short training before the full one: the longest rows, which decide over memory, and a sample."""

import hashlib
import math
import random
from dataclasses import dataclass, replace
from pathlib import Path

from vlmflow.config.run_settings import SmokeSettings
from vlmflow.errors import VlmflowError
from vlmflow.files import whole_file
from vlmflow.training.job import TrainJob
from vlmflow.training.lengths import RowLength, lines_of


@dataclass(frozen=True)
class SmokeRows:
    """The rows that a smoke run trains on, and those that it evaluates."""

    train: list[RowLength]
    val: list[RowLength]


def choose_rows(train: list[RowLength], val: list[RowLength], full: TrainJob, smoke: SmokeSettings) -> SmokeRows:
    """Give the longest rows of both splits by tokens, and of the train split a sample, drawn with the run's seed.

    train, val: the lengths of all rows. The sample is no larger than what the steps leave room for: each chosen
    row is trained on at least once.

    Raises VlmflowError where the steps do not suffice for the longest rows alone.
    """
    settings = full.settings
    rows_per_step = full.processes * settings.per_device_batch_size * settings.gradient_accumulation_steps
    room = smoke.steps * rows_per_step - smoke.longest
    if room < 0:
        raise VlmflowError(
            f"smoke.steps = {smoke.steps} steps of {rows_per_step} row(s) do not reach smoke.longest = {smoke.longest}",
            f"set smoke.steps to {math.ceil(smoke.longest / rows_per_step)} or more",
        )
    by_length = sorted(train, key=_longest_first)
    others = by_length[smoke.longest :]
    sample = random.Random(settings.seed).sample(others, min(smoke.sample, room, len(others)))  # noqa: S311
    return SmokeRows(by_length[: smoke.longest] + sample, sorted(val, key=_longest_first)[: smoke.longest])


def _longest_first(row: RowLength) -> tuple[int, int]:
    return -row.tokens, row.start


def smoke_job(full: TrainJob, chosen: SmokeRows, smoke: SmokeSettings, folder: Path) -> TrainJob:
    """Give the full run's job cut down to the smoke run: its own settings, fewer rows and steps.

    folder: the rows are written below it, in a folder named by their digest.
    """
    lines = {"train": lines_of(full.data.train, chosen.train), "val": lines_of(full.data.val, chosen.val)}
    digest = hashlib.sha256(b"\0".join(lines.values())).hexdigest()
    files = {split: folder / "rows" / digest[:16] / f"{split}.jsonl" for split in lines}
    for split, file in files.items():
        with whole_file(file) as target:
            target.write(lines[split])
    return replace(
        full,
        data=replace(full.data, **files, digest=digest + full.data.digest),
        settings=full.settings.model_copy(
            update={"max_steps": smoke.steps, "checkpoint_steps": (smoke.steps + 1) // 2}
        ),
    )
