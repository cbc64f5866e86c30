"""The results of converting a raw row, and their form in converted/DATASET/SPLIT.jsonl.

Converts raw rows to ShareGPT rows on all cores, in the order of the raw files.
"""

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from vlmflow.config.settings import PartOf, RowChoice
from vlmflow.core.files import whole_file
from vlmflow.core.processes import ordered_map
from vlmflow.core.progress import Progress
from vlmflow.raw.choice import left_out
from vlmflow.raw.named import Named, reader
from vlmflow.raw.split import SHARD_BYTES, RawRows
from vlmflow.rows.chat import Reject, Turn
from vlmflow.rows.raw_text import row_id
from vlmflow.rows.sharegpt import ShareGptRow, as_line
from vlmflow.rows.strict_rows import Found, UnreadKeys
from vlmflow.rows.unread import Unread

if TYPE_CHECKING:  # it loads the forms, which load this module
    from vlmflow.config.data_settings import DatasetSettings


class ConvertedRow(ShareGptRow, kw_only=True, gc=False):
    """A ShareGPT row with the facts about its raw row that validation needs.

    raw_row: the number of the raw row, counted from 0; rows from the same raw row are consecutive.
    score_field_differs: see `trajectories.Trajectory`.
    """

    raw_row: int
    score_field_differs: bool


class RejectedRow(msgspec.Struct):
    """A raw row that is unusable or left out.

    raw_row: its number, counted from 0. reason: a key of `rejects.REASONS`. detail: the exact cause, for people; for
    `source_left_out` the row's source.
    """

    raw_row: int
    reason: str
    detail: str


RowsOf = Callable[[str, int, Any, int], list[ConvertedRow] | Reject]
"""Takes the id for the training rows, the number of the raw row, the decoded row, and its size in bytes; returns the
training rows, or why there are none. It counts what it changes of the texts of usable rows."""


@dataclass(frozen=True)
class HowToConvert:
    """How raw rows become training rows: settings of the data set, and who counts what is not read or is changed.

    settings: those that `RuleParams.conversion` passes; only forms with several training rows of a
    raw one read how trajectories become rows. system: the first turn of a conversation without one.
    """

    unread: Unread
    settings: "PartOf[DatasetSettings]"
    system: list[Turn]


@dataclass(frozen=True)
class MakeRows:
    """Converts raw rows.

    make: takes the id for the training rows, and the number and the bytes of the raw row; returns the training rows, or
    why there are none. It never raises.
    unread: counts what `make` does not read of the usable rows.
    """

    make: Callable[[str, int, bytes], list[ConvertedRow] | Reject]
    unread: Unread

    def __call__(self, identity: str, number: int, row: bytes) -> list[ConvertedRow] | Reject:
        """Convert one raw row; see `make`."""
        return self.make(identity, number, row)


OWN_FIELDS = re.compile(rb',"raw_row":\d+,"score_field_differs":(?:true|false)}$')
"""The fields that only a converted row has. The converter writes them last, in this order, in at most
OWN_FIELDS_LENGTH bytes."""
OWN_FIELDS_LENGTH = 80


def training_line(line: bytes, row: ConvertedRow, images: list[str]) -> bytes:
    """Return a converted row as a line of a training file: JSON without OWN_FIELDS, and a line feed.

    If the pictures' names stay the same, this only cuts the line.
    line: the JSON of `row`, without a line feed. images: the pictures' names in the store.
    """
    if images == row.images and (own := OWN_FIELDS.search(line, max(0, len(line) - OWN_FIELDS_LENGTH))):
        return line[: own.start()] + b"}\n"
    return as_line(row, images) + b"\n"


class Conversion(UnreadKeys, kw_only=True):
    """The account of a conversion, `unread.json`: what was not read of the rows, and the digests of the outputs."""

    digests: dict[str, str]
    """SHA-256 of the converted rows and of the rejects, by file name."""


def convert(
    rows: RawRows,
    converted: Path,
    rejects: Path,
    split: str,
    make: MakeRows,
    choice: RowChoice,
    processes: int,
    why: str = "",
) -> Conversion:
    """Write every raw row as training rows to `converted`, or with a reason to `rejects`.

    Both are JSON lines (ConvertedRow, RejectedRow) in the order of the raw rows, with the same bytes for any number of
    processes. split: "train" or "test". make: converts a row. choice: which rows are used; the others are rejected as
    left out. why: with `kind: auto`, the kind that was found, and why (`found_kind.Found`).

    Returns the account. It has the digests of both files, because reading these again would take a tenth of the time
    of the conversion.
    Raises VlmflowError if a key that is not read changes what rows mean.
    """
    unread = make.unread
    account = Found()
    of_good, of_bad = hashlib.sha256(), hashlib.sha256()
    with (
        whole_file(converted) as good,
        whole_file(rejects) as bad,
        Progress(f"converting {rows}", len(rows), "rows") as progress,
    ):
        convert_shard = partial(_convert_shard, rows, split, make, left_out(rows, choice), reader(choice))
        for shard, lines, rejected, of_shard in ordered_map(convert_shard, rows.shards(SHARD_BYTES), processes):
            good.write(lines)
            bad.write(rejected)
            of_good.update(lines)
            of_bad.update(rejected)
            account.add(of_shard)
            progress.advance(len(shard))
        account.refuse(str(rows), converted.parent.name, unread.meaning, unread.ignored, why)
    digests = {converted.name: of_good.hexdigest(), rejects.name: of_bad.hexdigest()}
    counts = msgspec.structs.asdict(account.counts(unread.ignored)) | {"found_kind": why}
    return Conversion(**counts, digests=digests)


def _convert_shard(
    rows: RawRows,
    split: str,
    make: MakeRows,
    reason_left_out: Callable[[int], str],
    read: Callable[[bytes], Named | None],
    shard: range,
) -> tuple[range, bytes, bytes, Found]:
    make_rows = make.make
    good: list[ConvertedRow] = []
    bad: list[RejectedRow] = []
    for number, row in zip(shard, rows.of(shard), strict=True):
        if reason := reason_left_out(number):
            named = read(row) if reason == "source_left_out" else None
            bad.append(RejectedRow(number, reason, named.source if named else ""))
            continue
        if number in rows.faults:
            bad.append(RejectedRow(number, "bad_table_row", rows.faults[number]))
            continue
        made = make_rows(row_id(split, number, row), number, row)
        if isinstance(made, Reject):
            bad.append(RejectedRow(number, made.reason, made.detail))
        else:
            good.extend(made)
    encoder = msgspec.json.Encoder()
    account = make.unread.take(rows.unread_columns(shard), shard.start)
    return shard, encoder.encode_lines(good), encoder.encode_lines(bad), account
