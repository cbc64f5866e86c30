"""What happened to every row of a data set: the first part of the data page and of the counts page."""

from dataclasses import dataclass

from vlmflow.pictures.manifest import REASONS as PICTURE_REASONS
from vlmflow.reports.page import Tile
from vlmflow.rows.chat import HARMLESS, LEFT_OUT, REASONS
from vlmflow.rows.raw_text import RULES
from vlmflow.rows.stats import SplitCounts, Stats
from vlmflow.rows.strict_rows import UnreadKeys

KINDS = {
    "kept": "kept",
    "row": "rejected for its content",
    "picture": "rejected for its picture",
    "again": "rejected as duplicates or leaks",
    "unasked": "not requested, left out",
}
"""The possible results of a row; the keys are names of colours in the stylesheet."""

UNREAD_SHOWN = 50


@dataclass(frozen=True)
class Segment:
    """The rows of a raw split with the same result. kind: a key of KINDS."""

    kind: str
    label: str
    count: int


@dataclass(frozen=True)
class Split:
    """A raw split, and the results of its rows."""

    name: str
    rows_in: int
    kept: int
    rejected: int
    left_out: int
    segments: list[Segment]


@dataclass(frozen=True)
class Counted:
    """Rows that have something in common. counts: by raw split."""

    name: str
    counts: dict[str, int]

    @property
    def total(self) -> int:
        """The rows of all splits."""
        return sum(self.counts.values())


@dataclass(frozen=True)
class Loss(Counted):
    """The rows lost for one reason. kind: a key of KINDS. share: relative to the rows of the costliest reason."""

    kind: str
    meaning: str
    share: float


@dataclass(frozen=True)
class Mixed:
    """What a mixture has of one of its data sets.

    drawn: the value of `mix`. train: what became of its train rows. examples: its rows in the mixture's files.
    """

    name: str
    drawn: str
    train: SplitCounts
    examples: dict[str, int]

    @property
    def held_out(self) -> int:
        """Train rows that the test or val split of any data set keeps out."""
        return sum(self.train.rejects.values())


@dataclass(frozen=True)
class RowAccount:
    """The results of all rows, the costliest reason first; unread: their unread keys, the most frequent first.

    mixed: the data sets of a mixture; none otherwise.
    """

    splits: list[Split]
    rejected: list[Loss]
    left_out: list[Loss]
    unread: list[Counted]
    mixed: list[Mixed]

    @property
    def names(self) -> list[str]:
        """The raw splits."""
        return [split.name for split in self.splits]


def row_account(stats: Stats) -> RowAccount:
    """Collect these facts from a data set's account."""
    return RowAccount(
        [_split(name, counts) for name, counts in stats.splits.items()],
        _losses({name: counts.rejects for name, counts in stats.splits.items()}),
        _losses({name: counts.rows_left_out for name, counts in stats.splits.items()}),
        ranked({name: _unread(stats.unread[name]) for name in stats.splits})[:UNREAD_SHOWN],
        [Mixed(name, one.drawn, one.train, one.examples) for name, one in stats.members.items()],
    )


def account_tiles(account: RowAccount) -> list[Tile]:
    """Return the figures at the top of both pages."""
    rows_in, kept, rejected, left_out = (
        sum(getattr(split, count) for split in account.splits) for count in ("rows_in", "kept", "rejected", "left_out")
    )
    return [
        Tile("rows of the data sets" if account.mixed else "raw rows in", f"{rows_in:,}", " and ".join(account.names)),
        Tile("kept", f"{kept:,}", f"{kept / (rows_in or 1):.1%} of them"),
        Tile("rejected", f"{rejected:,}", f"{rejected / (rows_in or 1):.1%}, with reasons"),
        *([Tile("left out", f"{left_out:,}", "not requested")] if left_out else []),
    ]


def ranked(counts: dict[str, dict[str, int]]) -> list[Counted]:
    """Convert counts by split and name to counts by name and split, the most frequent first."""
    table: dict[str, dict[str, int]] = {}
    for split, names in counts.items():
        for name, count in names.items():
            table.setdefault(name, {})[split] = count
    return sorted((Counted(*one) for one in table.items()), key=lambda one: (-one.total, one.name))


def _split(name: str, counts: SplitCounts) -> Split:
    lost = dict.fromkeys(KINDS, 0) | {"kept": counts.kept}
    for reason, count in counts.rejected.items():
        lost[_kind(reason)] += count
    segments = [Segment(kind, label, lost[kind]) for kind, label in KINDS.items() if lost[kind]]
    return Split(name, *counts.went, segments)


def _losses(rejected: dict[str, dict[str, int]]) -> list[Loss]:
    """Return the lost rows by reason. rejected: by raw split and reason."""
    table = ranked(rejected)
    most = table[0].total if table else 1
    return [Loss(one.name, one.counts, _kind(one.name), _meaning(one.name), one.total / most) for one in table]


def _unread(found: UnreadKeys) -> dict[str, int]:
    """Return what was not read, with the number of rows: keys first, by their names."""
    further, dropped = found.further_unread_keys, found.unanswered_last_turns
    return {
        **found.unread_keys,
        **({"further keys, each counted separately": further} if further else {}),
        **{f"{key}, if it changes what the row means (ignore_keys)": rows for key, rows in found.ignored_keys.items()},
        **({"unanswered last turn, dropped": dropped} if dropped else {}),
        **({"answer without `Answer:`, kept whole (thoughts)": whole} if (whole := found.answers_without_mark) else {}),
        **{RULES.get(rule, rule): rows for rule, rows in found.changed_texts.items()},
        **({"feedback of another form, kept (feedback_form)": raw} if (raw := found.feedback_of_other_form) else {}),
    }


def _meaning(reason: str) -> str:
    return REASONS.get(reason) or PICTURE_REASONS.get(reason.removeprefix("picture_"), "")


def _kind(reason: str) -> str:
    if reason in LEFT_OUT:
        return "unasked"
    if reason in HARMLESS:
        return "again"
    return "picture" if reason.startswith("picture_") else "row"
