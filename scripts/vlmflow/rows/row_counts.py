"""The account of every raw row: kept, or rejected for one reason, and never lost in between."""

import re
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO

import msgspec

from vlmflow.core.errors import VlmflowError
from vlmflow.raw.split import RawRows
from vlmflow.rows.advice import advice
from vlmflow.rows.rejects import HARMLESS, LEFT_OUT, REASONS, Reject
from vlmflow.rows.row_check import Verdict
from vlmflow.rows.stats import SplitCounts

RAW_KEPT = 1 << 20
"""A rejected row's own text goes into the quarantine up to this many bytes; its place always does."""

DETAIL_KEPT = 100
"""Characters of a reject's detail that go into the quarantine: from its beginning, and as many from its end, where the
reason often stands: a hostile row may put megabytes into it."""

EXAMPLES_SHOWN = 3

BYTE_OF_ROW = re.compile(r"\(byte (\d+)\)$")
"""How a decoder names a byte, counted from the beginning of the row."""


class QuarantinedRow(msgspec.Struct):
    """A rejected row: its place, the reason, and its content.

    row: number in the raw split, counted from 0 over all of its files. file, file_row: its file, and its number there.
    start, end: its bytes in the file; null in parquet, which has no such place.
    checksum: of the raw row (RawRows.checksum), to recognise its fixed row.
    raw: the row itself as JSON; as a text if it is not JSON; null if it is larger than RAW_KEPT, or if parquet has
    values that no JSON can hold.
    """

    split: str
    row: int
    reason: str
    detail: str
    file: str
    file_row: int
    start: int | None
    end: int | None
    checksum: str
    raw: msgspec.Raw


@dataclass
class Account:
    """Where the rows of one raw split went, in raw rows.

    quarantine: the file that rejected rows are written into, open; quarantine_path: its name until it is whole.
    attempts: how many kept rows have how many. sources_left_out: the sources of rows whose source is not asked for.
    shown: by reason, the first rows with their details.
    """

    split: str
    rows: RawRows
    quarantine: IO[bytes]
    quarantine_path: Path
    kept: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    attempts: Counter[int] = field(default_factory=Counter)
    sources: Counter[str] = field(default_factory=Counter)
    sources_left_out: Counter[str] = field(default_factory=Counter)
    score_field_differs: int = 0
    shown: dict[str, list[tuple[int, str]]] = field(default_factory=dict)

    def count_kept(self, verdicts: list[Verdict]) -> None:
        """Count one raw row as kept, by the verdicts over its training rows."""
        last = verdicts[-1]
        self.kept += 1
        self.attempts[last.attempts if len(verdicts) == 1 else len(verdicts)] += 1
        self.sources[last.source] += 1
        self.score_field_differs += last.score_field_differs

    def reject(self, number: int, reject: Reject) -> None:
        """Count raw row `number` as rejected, and write it into the quarantine if it was not left out on purpose."""
        self.rejected[reject.reason] += 1
        if reject.reason in LEFT_OUT:
            if reject.reason == "source_left_out":
                self.sources_left_out[reject.detail] += 1
            return
        place = self.rows.place(number)
        detail = _shortened(BYTE_OF_ROW.sub(partial(self._byte_of_file, number), reject.detail))
        row = QuarantinedRow(
            split=self.split,
            row=number,
            reason=reject.reason,
            detail=detail,
            file=str(place.file),
            file_row=place.row,
            start=place.start,
            end=place.end,
            checksum=self.rows.checksum(number),
            raw=_as_json(self.rows[number]),
        )
        self.quarantine.write(msgspec.json.encode(row) + b"\n")
        examples = self.shown.setdefault(reject.reason, [])
        if len(examples) < EXAMPLES_SHOWN:
            examples.append((number, detail))

    def counts(self) -> SplitCounts:
        """Give the split's part of `stats.json`."""
        return SplitCounts(len(self.rows), self.kept, dict(sorted(self.rejected.items())))

    def close(self, max_reject_share: float) -> None:
        """Check that every row is accounted for and that enough are left.

        Raises VlmflowError with the counts and examples of each reason.
        """
        rows_in, rejected = len(self.rows), self.rejected.total()
        if self.kept + rejected != rows_in:
            raise VlmflowError(
                f"{self.rows}: {rows_in} rows in, {self.kept} kept, {rejected} rejected: the counts do not add up",
                "the converted files do not match these raw rows; run the rule that converts them again (--forcerun)",
            )
        rejects = Counter({reason: count for reason, count in self.rejected.items() if reason not in HARMLESS})
        asked_for = rows_in - sum(self.rejected[reason] for reason in LEFT_OUT)
        if self.kept == 0:
            raise self._refusal(f"none of the {rows_in} rows is left", self.rejected, asked_for)
        if rejects.total() > max_reject_share * asked_for:
            raise self._refusal(
                f"{rejects.total()} of {asked_for} rows were rejected ({rejects.total() / asked_for:.1%}, "
                f"not counting duplicates and leaks); max_reject_share allows {max_reject_share:.1%}",
                rejects,
                asked_for,
            )

    def _refusal(self, cause: str, lost: Counter[str], asked_for: int) -> VlmflowError:
        """Give the error; lost: the rows that are too many, by reason; asked_for: all but those left out."""
        reasons = []
        for reason, count in self.rejected.most_common():
            examples = [f"{self.rows.named(number)}: {detail}" for number, detail in self.shown.get(reason, [])]
            reasons.append(f"  {count:>8} {reason}: " + "; ".join(examples or [REASONS.get(reason, "")]))
        return VlmflowError(
            "\n".join([f"{self.rows}: {cause} (rows are counted from 0, lines from 1)", *reasons]),
            advice(lost, asked_for, self.sources_left_out, self.quarantine_path, none_left=not self.kept),
        )

    def _byte_of_file(self, number: int, byte: re.Match[str]) -> str:
        """Say which byte of the file a byte of a row is; a fixed row is in no file."""
        start = None if number in self.rows.mended else self.rows.place(number).start
        return f"(byte {byte[1]} of the row)" if start is None else f"(byte {start + int(byte[1])} of the file)"


def _shortened(detail: str) -> str:
    return detail if len(detail) <= 2 * DETAIL_KEPT else f"{detail[:DETAIL_KEPT]} … {detail[-DETAIL_KEPT:]}"


def _as_json(row: bytes) -> msgspec.Raw:
    if len(row) > RAW_KEPT:
        return msgspec.Raw(b"null")
    try:
        msgspec.json.decode(row)
        row.decode()
        return msgspec.Raw(b" ".join(row.splitlines()))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return msgspec.Raw(msgspec.json.encode(row.decode(errors="backslashreplace")))
