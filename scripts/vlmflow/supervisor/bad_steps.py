"""Refuses to continue a training that a step has spoiled, with that step and its rows."""

import json
from itertools import islice
from pathlib import Path

from vlmflow.core.account import read_account
from vlmflow.core.errors import VlmflowError
from vlmflow.in_trainer.bad_step import BadStep, Fault, account_of
from vlmflow.supervisor.checkpoint import NAME
from vlmflow.supervisor.run_folder import RunFolder

NAMED = 8
"""How many rows a message names."""


def refuse_bad_step(folder: RunFolder, train: Path, what: str) -> None:
    """Raise VlmflowError if a step has spoiled the training of a run folder.

    train: the rows that it trains on. what: the stage and run, for the message.
    """
    file = account_of(folder.path)
    if not file.is_file():
        return
    bad = read_account(file, BadStep)
    steps = [int(place.name.partition("-")[2]) for place in folder.output.glob("*") if NAME.fullmatch(place.name)]
    spoiled = [f"checkpoint-{step}" for step in sorted(steps) if step >= bad.first]
    good = max((step for step in steps if step < bad.first), default=None)
    last_good = f"the last good checkpoint is that of step {good}" if good is not None else "no checkpoint is good"
    raise VlmflowError(
        f"{what}: step {bad.step}: {_said(bad)}; rows {_named(ids_of(train, bad.rows))}; {last_good} ({folder.output})",
        f"lower runs.NAME.train.learning_rate; or correct the rows{_shown_by(folder, bad.step)}, or leave them out, in "
        f"the raw file; both train from step 0. To train on unchanged, remove {' and '.join([str(file), *spoiled])}",
    )


def ids_of(train: Path, rows: list[int]) -> list[str]:
    """Return the ids of rows. train: their file. rows: their lines in it, ascending from 0."""
    with train.open("rb") as lines:
        chosen = set(rows)
        read = [line for number, line in enumerate(islice(lines, max(rows, default=-1) + 1)) if number in chosen]
    return [str(json.loads(line).get("id", f"line {row + 1}")) for row, line in zip(rows, read, strict=True)]


def _shown_by(folder: RunFolder, step: int) -> str:
    """Return the command that shows a step's rows; there is one for full trainings, at RUN/full/DIGEST."""
    kind = folder.path.absolute().parent
    return f" (make rows RUN={kind.parent.name} STEP={step} shows them)" if kind.name == "full" else ""


def _said(bad: BadStep) -> str:
    if bad.fault is Fault.EXPLODED:
        return f"{bad.fault}: {', '.join(bad.losses)} nats per token from step {bad.first} on"
    return f"{bad.fault} (loss {bad.losses[-1]})"


def _named(ids: list[str]) -> str:
    more = f" and {len(ids) - NAMED} more" if len(ids) > NAMED else ""
    return ", ".join(ids[:NAMED]) + more
