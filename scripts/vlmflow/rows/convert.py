"""Converts raw rows to ShareGPT rows on all cores, in the order of the raw files."""

import hashlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from vlmflow.config.row_settings import RowChoice
from vlmflow.core.files import whole_file
from vlmflow.core.parallel import ordered_map
from vlmflow.core.progress import Progress
from vlmflow.raw.choice import left_out
from vlmflow.raw.named import Named, reader
from vlmflow.raw.split import SHARD_BYTES, RawRows
from vlmflow.rows.converted import ConvertedRow, MakeRows, RejectedRow
from vlmflow.rows.raw_text import row_id
from vlmflow.rows.rejects import Reject
from vlmflow.rows.unread_keys import Found, UnreadKeys


class Conversion(UnreadKeys, kw_only=True):
    """The account of a conversion, `unread.json`: what was not read of the rows, and the digests of the outputs."""

    digests: dict[str, str]
    """SHA-256 of the converted rows and of the rejects, by file name."""


def convert(
    rows: RawRows, converted: Path, rejects: Path, split: str, make: MakeRows, choice: RowChoice, processes: int
) -> Conversion:
    """Write every raw row as training rows to `converted`, or with a reason to `rejects`.

    Both are JSON lines (ConvertedRow, RejectedRow) in the order of the raw rows, with the same bytes for any number of
    processes. split: "train" or "test". make: converts a row. choice: which rows are used; the others are rejected as
    left out.

    Returns the account. It has the digests of both files, because reading these again would take a tenth of the time
    of the conversion.
    Raises VlmflowError if a key that is not read changes what rows mean.
    """
    unread = make.unread
    found = Found()
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
            found.add(of_shard)
            progress.advance(len(shard))
        found.refuse(str(rows), converted.parent.name, unread.meanings, unread.ignored)
    digests = {converted.name: of_good.hexdigest(), rejects.name: of_bad.hexdigest()}
    return Conversion(**msgspec.structs.asdict(found.counts(unread.ignored)), digests=digests)


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
    found = make.unread.take(rows.unread_columns(shard), shard.start)
    return shard, encoder.encode_lines(good), encoder.encode_lines(bad), found
