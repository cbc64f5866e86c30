"""Raw rows to ShareGPT rows, over all cores, in the order of the raw file."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from vlmflow.files import whole_file
from vlmflow.json_rows import JsonRows
from vlmflow.parallel import ordered_map
from vlmflow.progress import Progress
from vlmflow.rows.fire import Trajectory, read_trajectory, row_id, timestep_rows, trajectory_row
from vlmflow.rows.rejects import Reject
from vlmflow.rows.sharegpt import ShareGptRow

SHARD_BYTES = 1 << 20
"""Raw bytes that a worker takes at a time: large beside the cost of handing over, small beside memory."""


class ConvertedRow(ShareGptRow, gc=False):
    """A ShareGPT row with what the validator needs to know of its raw row.

    raw_row: the number of the raw row, counted from 0; rows from the same raw row follow each other.
    score_field_differs: see `fire.Trajectory`.
    """

    raw_row: int
    score_field_differs: bool


class RejectedRow(msgspec.Struct):
    """A raw row that the converter could not use; raw_row: its number, counted from 0."""

    raw_row: int
    reason: str
    detail: str


Form = Callable[[str, Trajectory], list[ShareGptRow]]
"""Makes a trajectory's training rows, given the identity of its raw row."""


def training_form(form: str, max_history_rounds: int | None) -> Form:
    """Give the function of a configured form: "trajectory" or "timestep"."""
    if form == "timestep":
        return partial(timestep_rows, max_history_rounds=max_history_rounds)
    return lambda identity, trajectory: [trajectory_row(identity, trajectory)]


def convert_fire(raw: Path, converted: Path, rejects: Path, split: str, form: Form, processes: int) -> None:
    """Write every raw FIRE row as training rows to `converted`, or with a reason to `rejects`.

    Both are JSON lines (ConvertedRow, RejectedRow) in the order of the raw rows, the same bytes whatever the
    number of processes. Raises VlmflowError where the raw file as a whole cannot be read.
    """
    with (
        JsonRows(raw) as rows,
        whole_file(converted) as good,
        whole_file(rejects) as bad,
        Progress(f"convert_fire {raw.name}", len(rows), "rows") as progress,
    ):
        convert_shard = partial(_convert_shard, rows, split, form)
        for shard, lines, rejected in ordered_map(convert_shard, rows.shards(SHARD_BYTES), processes):
            good.write(lines)
            bad.write(rejected)
            progress.advance(len(shard))


def _convert_shard(rows: JsonRows, split: str, form: Form, shard: range) -> tuple[range, bytes, bytes]:
    good: list[ConvertedRow] = []
    bad: list[RejectedRow] = []
    for number in shard:
        row = rows[number]
        trajectory = read_trajectory(row)
        if isinstance(trajectory, Reject):
            bad.append(RejectedRow(number, trajectory.reason, trajectory.detail))
            continue
        differs = trajectory.score_field_differs
        for made in form(row_id(split, number, row), trajectory):
            fields = (made.id, made.source, made.images, made.attempts, made.scores, made.conversations)
            good.append(ConvertedRow(*fields, raw_row=number, score_field_differs=differs))
    encoder = msgspec.json.Encoder()
    return shard, encoder.encode_lines(good), encoder.encode_lines(bad)
