"""The account of every raw row: kept, or rejected for one reason, and never lost in between."""

from collections import Counter
from dataclasses import dataclass, field
from typing import IO

import msgspec

from vlmflow.errors import VlmflowError
from vlmflow.json_rows import JsonRows
from vlmflow.rows.rejects import HARMLESS, Reject
from vlmflow.rows.row_check import Verdict

RAW_KEPT = 1 << 20
"""A rejected row's own text goes into the quarantine up to this many bytes; its place always does."""

EXAMPLES_SHOWN = 3


class QuarantinedRow(msgspec.Struct):
    """A rejected row: where it stands, why it was rejected, and what it holds.

    row: number in the raw file, counted from 0. start, end: its bytes there.
    raw: the row itself as JSON; as a text where it is none; null where it is larger than RAW_KEPT.
    """

    split: str
    row: int
    reason: str
    detail: str
    file: str
    start: int
    end: int
    raw: msgspec.Raw


@dataclass
class Account:
    """Where the rows of one raw split went, in raw rows; attempts: how many kept rows have how many."""

    split: str
    rows: JsonRows
    quarantine: IO[bytes]
    kept: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    attempts: Counter[int] = field(default_factory=Counter)
    sources: Counter[str] = field(default_factory=Counter)
    score_field_differs: int = 0
    shown: dict[str, list[str]] = field(default_factory=dict)

    def keep(self, verdicts: list[Verdict]) -> None:
        """Count one raw row as kept, by the verdicts over its training rows."""
        last = verdicts[-1]
        self.kept += 1
        self.attempts[last.attempts if len(verdicts) == 1 else len(verdicts)] += 1
        self.sources[last.source] += 1
        self.score_field_differs += last.score_field_differs

    def reject(self, number: int, reject: Reject) -> None:
        """Count raw row `number` as rejected, and write it into the quarantine."""
        self.rejected[reject.reason] += 1
        row = QuarantinedRow(
            split=self.split,
            row=number,
            reason=reject.reason,
            detail=reject.detail,
            file=str(self.rows.path),
            start=self.rows.starts[number],
            end=self.rows.ends[number],
            raw=_as_json(self.rows[number]),
        )
        self.quarantine.write(msgspec.json.encode(row) + b"\n")
        examples = self.shown.setdefault(reject.reason, [])
        if len(examples) < EXAMPLES_SHOWN:
            examples.append(f"row {number}: {reject.detail[:120]}")

    def counts(self) -> dict[str, object]:
        """Give the split's part of `stats.json`."""
        return {
            "rows_in": len(self.rows),
            "kept": self.kept,
            "rejected": dict(sorted(self.rejected.items())),
        }

    def close(self, max_reject_share: float) -> None:
        """Check that every row is accounted for and that enough are left.

        Raises VlmflowError with the counts and examples of each reason.
        """
        rows_in, rejected = len(self.rows), self.rejected.total()
        if self.kept + rejected != rows_in:
            raise VlmflowError(
                f"{self.rows.path}: {rows_in} rows in, {self.kept} kept, {rejected} rejected: they do not add up",
                "the converted files do not belong to this raw file; run again with --forcerun convert_fire",
            )
        counted = sum(count for reason, count in self.rejected.items() if reason not in HARMLESS)
        if self.kept == 0:
            raise self._refusal(f"none of {rows_in} rows is left")
        if counted > max_reject_share * rows_in:
            raise self._refusal(
                f"{counted} of {rows_in} rows are rejected ({counted / rows_in:.1%}, without duplicates and leaks), "
                f"max_reject_share allows {max_reject_share:.1%}"
            )

    def _refusal(self, cause: str) -> VlmflowError:
        reasons = [
            f"  {count:>8} {reason}: " + "; ".join(self.shown[reason]) for reason, count in self.rejected.most_common()
        ]
        return VlmflowError(
            "\n".join([f"{self.rows.path}: {cause}", *reasons]),
            f"look at {self.quarantine.name}; mend the rows or the picture roots, or allow more rejects "
            "(datasets.NAME.max_reject_share)",
        )


def _as_json(row: bytes) -> msgspec.Raw:
    if len(row) > RAW_KEPT:
        return msgspec.Raw(b"null")
    try:
        msgspec.json.decode(row)
        row.decode()
        return msgspec.Raw(b" ".join(row.splitlines()))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return msgspec.Raw(msgspec.json.encode(row.decode(errors="backslashreplace")))
