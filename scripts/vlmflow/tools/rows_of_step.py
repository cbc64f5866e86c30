"""Which rows the full training of a run took in a step, also of one that is not finished, and of a step that failed."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from vlmflow.config.model import settings_of
from vlmflow.core.account import read_account
from vlmflow.core.errors import VlmflowError, counted, printable
from vlmflow.in_trainer.messages import ROWS_OF_STEPS, last_step_begun, rows_of_step
from vlmflow.lengths.count import lines_of, read_lengths
from vlmflow.lengths.summary import fitted_rows
from vlmflow.supervisor.run_folder import JOB

WORDS = 60
"""How many characters of a row's text are shown."""


def main(run: str, step: int, files: list[Path], folder: Path) -> None:
    """Print the rows of a step.

    files: as for snakemake's --configfile. folder: the working directory.

    Raises VlmflowError if the training has not reached the step, or its rows have changed.
    """
    run_folder = newest_training(folder / settings_of(files).stores.runs, run)
    rows = trained_rows(run_folder, folder / "fitted" / run, step)
    print(f"{run_folder}, step {step}: {counted(len(rows), 'row')}, {sum(row.tokens for row in rows):,} tokens")
    width = max(len(row.id) for row in rows)
    print(f"{'rank':>4} {'pass':>4} {'id':<{width}} {'tokens':>7}  source: first words")
    for row in rows:
        print(f"{row.rank:>4} {row.forward_pass:>4} {row.id:<{width}} {row.tokens:>7,}  {row.source}: {row.text}")


class _Data(msgspec.Struct):
    digest: str


class _Job(msgspec.Struct):
    """The part of a run folder's job.json that names its rows."""

    data: _Data


@dataclass(frozen=True)
class TrainedRow:
    """A row of a step. forward_pass: of its rank, from 1. tokens: with pictures. text: the first words."""

    rank: int
    forward_pass: int
    id: str
    tokens: int
    source: str
    text: str


def newest_training(store: Path, run: str) -> Path:
    """Return the run folder of a run's full training in which a step began last.

    store: the folder of all run folders. Raises VlmflowError if there is none.
    """
    folders = (file.parents[1] for file in (store / run / "full").glob(f"*/{ROWS_OF_STEPS}/rank-0.txt"))
    newest = max(folders, key=lambda folder: (folder / ROWS_OF_STEPS / "rank-0.txt").stat().st_mtime_ns, default=None)
    if newest is None:
        raise VlmflowError(
            f"{store / run / 'full'}: no full training of {run!r} has begun a step",
            "check the run, and stores.runs in the configuration; name both by --configfile and --directory",
        )
    return newest


def trained_rows(run_folder: Path, rows: Path, step: int) -> list[TrainedRow]:
    """Return the rows of a step, by rank and forward pass.

    rows: the folder with the run's rows that fit (fitted/RUN).

    Raises VlmflowError if the training has not reached the step, or these are not the rows that it trained on.
    """
    of_ranks = rows_of_step(run_folder, step)
    if not of_ranks:
        reached = last_step_begun(run_folder)
        raise VlmflowError(
            f"{run_folder}: step {step} has not begun; the last step that began is {reached}", f"--step 1 to {reached}"
        )
    digests = fitted_rows(rows).digests
    trained_on = read_account(run_folder / JOB, _Job).data.digest
    if trained_on != "".join(digests[name] for name in ("train.jsonl", "val.jsonl", "pictures")):
        raise VlmflowError(
            f"{rows}: these are not the rows that {run_folder} was trained on",
            "the data has changed since: restore it, or train again",
        )
    lengths = list(read_lengths(rows / "train.lengths.jsonl"))
    trained = [
        (rank, number, lengths[row])
        for rank, batches in of_ranks.items()
        for number, batch in enumerate(batches, start=1)
        for row in batch
    ]
    lines = lines_of(rows / "train.jsonl", [length for _, _, length in trained]).splitlines()
    return [
        TrainedRow(rank, number, printable(length.id), length.tokens, **_shown(line))
        for (rank, number, length), line in zip(trained, lines, strict=True)
    ]


def _shown(line: bytes) -> dict[str, str]:
    """Return a row's source and first words, without characters that a terminal would obey."""
    row: dict[str, Any] = msgspec.json.decode(line)
    words = " ".join(turn["value"] for turn in row["conversations"]).split()
    return {"source": printable(str(row.get("source", ""))), "text": printable(" ".join(words))[:WORDS]}
