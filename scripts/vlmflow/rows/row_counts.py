"""Counts every raw row of a split as kept, or as rejected for one reason, and writes the quarantine."""

import re
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO

import msgspec

from vlmflow.core.errors import VlmflowError
from vlmflow.raw.row_keys import key_fault
from vlmflow.raw.split import RawRows
from vlmflow.rows.advice import advice
from vlmflow.rows.rejects import HARMLESS, LEFT_OUT, REASONS, Reject
from vlmflow.rows.row_check import Verdict
from vlmflow.rows.stats import SplitCounts

RAW_KEPT = 1 << 20
"""The largest rejected row, in bytes, whose content is written to the quarantine; its place always is."""

DETAIL_KEPT = 150
"""The characters of a reject's detail that are kept from its beginning, and from its end, which often has the reason. A
hostile row may put megabytes between them."""

EXAMPLES_SHOWN = 3

BYTE_OF_ROW = re.compile(r"\(byte (\d+)\)$")
"""The end of a decoder's message: the byte of the fault, counted from the beginning of the row."""


class QuarantinedRow(msgspec.Struct):
    """A line of quarantine.jsonl: a rejected row with its place, the reason and its content.

    row: its number in the raw split, counted from 0 over all files. file, file_row: its file, and its number there.
    start, end: its first byte in the file and the byte after its last; null in parquet, which has no such place.
    checksum: that of the raw row (RawRows.checksum), to recognise a fixed row that replaces it.
    raw: the row, or the fixed row that replaced it, as JSON; as a text if it is not JSON or has a key twice; null if it
    is larger than RAW_KEPT, or if parquet has values that JSON cannot hold.
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
    """The results of all rows of one raw split; all counts are of raw rows.

    quarantine: the open file for rejected rows. quarantine_path: its path until it is complete.
    attempts: the kept rows by number of attempts. sources: the kept rows by source.
    sources_left_out: the rows that were left out for their source, by source.
    score_field_differs: the kept rows with such a field (see `trajectories.Trajectory`).
    shown: by reason, the first rows with their details, for messages.
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
        """Count one raw row as kept. verdicts: those on its training rows, at least one."""
        last = verdicts[-1]
        self.kept += 1
        self.attempts[max(verdict.attempts for verdict in verdicts)] += 1
        self.sources[last.source] += 1
        self.score_field_differs += last.score_field_differs

    def reject(self, number: int, reject: Reject) -> None:
        """Count raw row `number` as rejected, and write it to the quarantine unless it was not requested (LEFT_OUT)."""
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
        """Return the split's part of `stats.json`."""
        return SplitCounts(len(self.rows), self.kept, dict(sorted(self.rejected.items())))

    def close(self, max_reject_share: float) -> None:
        """Check that every row is accounted for and that enough are kept.

        max_reject_share: the largest share of the requested rows that may be rejected for a fault (not HARMLESS).

        Raises VlmflowError if the counts do not add up; also if no row is kept, or too many are rejected, with counts
        and examples by reason.
        """
        rows_in, rejected = len(self.rows), self.rejected.total()
        if self.kept + rejected != rows_in:
            raise VlmflowError(
                f"{self.rows}: {rows_in} rows in, {self.kept} kept, {rejected} rejected: the counts do not add up",
                "the converted files are not those of these raw rows: remove them and run the same command again",
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
        """Return the error. lost: the number of lost rows by reason. asked_for: the number of requested rows."""
        reasons = []
        for reason, count in self.rejected.most_common():
            examples = [f"{self.rows.named(number)}: {detail}" for number, detail in self.shown.get(reason, [])]
            reasons.append(f"  {count:>8} {reason}: " + "; ".join(examples or [REASONS.get(reason, "")]))
        return VlmflowError(
            "\n".join([f"{self.rows}: {cause} (rows are counted from 0, lines from 1)", *reasons]),
            advice(lost, asked_for, self.sources_left_out, self.quarantine_path, none_left=not self.kept),
        )

    def _byte_of_file(self, number: int, byte: re.Match[str]) -> str:
        """Convert the byte in a decoder's message to the byte of the file; a fixed row and parquet have none."""
        start = None if number in self.rows.fixed else self.rows.place(number).start
        return f"(byte {byte[1]} of the row)" if start is None else f"(byte {start + int(byte[1])} of the file)"


def _shortened(detail: str) -> str:
    return detail if len(detail) <= 2 * DETAIL_KEPT else f"{detail[:DETAIL_KEPT]} … {detail[-DETAIL_KEPT:]}"


def _as_json(row: bytes) -> msgspec.Raw:
    """Return a row as JSON. If it has a key twice, it is a text: a tool that writes JSON again would lose one."""
    if len(row) > RAW_KEPT:
        return msgspec.Raw(b"null")
    try:
        msgspec.json.decode(row)
        row.decode()
        if not key_fault(row):
            return msgspec.Raw(b" ".join(row.splitlines()))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    return msgspec.Raw(msgspec.json.encode(row.decode(errors="backslashreplace")))
