"""The counts page of `validate_sharegpt`: what became of every raw row of a data set. The data page begins with it."""

from collections.abc import Mapping
from typing import Any

from vlmflow.pictures.manifest import REASONS as PICTURE_REASONS
from vlmflow.reports.page import render
from vlmflow.rows.chat import HARMLESS, LEFT_OUT, REASONS
from vlmflow.rows.raw_text import RULES
from vlmflow.rows.stats import SplitCounts, Stats
from vlmflow.rows.strict_rows import UnreadKeys

OUTCOMES = {
    "kept": "kept",
    "row": "rejected for its content",
    "picture": "rejected for its picture",
    "again": "rejected as duplicates or leaks",
    "unasked": "not requested, left out",
}
"""The possible results of a row; the keys are names of colours in the stylesheet."""

UNREAD_SHOWN = 50

Ranked = list[tuple[str, dict[str, int]]]
"""Names with their numbers of rows by raw split, the most frequent first."""


def counts_page(stats: Stats) -> str:
    """Return the account of a data set (`stats.json`) as an HTML page."""
    unusable = [
        (split, reason, cost) for split in stats.splits for reason, cost in stats.pictures[split].unusable.items()
    ]
    unusable.sort(key=lambda row: -row[2].rows)
    return render("counts.html.jinja", unusable=unusable, picture_reasons=PICTURE_REASONS, **row_account(stats))


def row_account(stats: Stats) -> dict[str, Any]:
    """Return the facts for `account.html.jinja`, which both pages show: what became of the rows, and why.

    rejected, left_out: by reason. unread: what was not read, or was changed, in converted rows.
    """
    return {
        "stats": stats,
        "rejected": ranked({split: counts.rejects for split, counts in stats.splits.items()}),
        "left_out": ranked({split: counts.rows_left_out for split, counts in stats.splits.items()}),
        "unread": ranked({split: _unread(stats.unread[split]) for split in stats.splits})[:UNREAD_SHOWN],
        "outcomes": OUTCOMES,
        "outcomes_of": _outcomes_of,
        "outcome_of": _outcome_of,
        "meaning_of": lambda reason: REASONS.get(reason) or PICTURE_REASONS.get(reason.removeprefix("picture_"), ""),
    }


def ranked(counts: Mapping[str, Mapping[str, int]]) -> Ranked:
    """Convert counts by split and name to counts by name and split."""
    table: dict[str, dict[str, int]] = {}
    for split, names in counts.items():
        for name, count in names.items():
            table.setdefault(name, {})[split] = count
    return sorted(table.items(), key=lambda row: (-sum(row[1].values()), row[0]))


def _outcomes_of(counts: SplitCounts) -> dict[str, int]:
    """Return the rows of a raw split by their result, without results that no row has."""
    rows = dict.fromkeys(OUTCOMES, 0) | {"kept": counts.kept}
    for reason, count in counts.rejected.items():
        rows[_outcome_of(reason)] += count
    return {outcome: count for outcome, count in rows.items() if count}


def _outcome_of(reason: str) -> str:
    if reason in LEFT_OUT:
        return "unasked"
    if reason in HARMLESS:
        return "again"
    return "picture" if reason.startswith("picture_") else "row"


def _unread(counts: UnreadKeys) -> dict[str, int]:
    """Return what was not read, with the number of rows: keys first, by their names."""
    others = {
        "further keys, each counted separately": counts.further_unread_keys,
        **{f"{key}, if it changes what the row means (ignore_keys)": rows for key, rows in counts.ignored_keys.items()},
        "unanswered last turn, dropped": counts.unanswered_last_turns,
        "answer without `Answer:`, kept whole (thoughts)": counts.answers_without_mark,
        **{RULES.get(rule, rule): rows for rule, rows in counts.changed_texts.items()},
        "feedback of another form, kept (feedback_form)": counts.feedback_of_other_form,
    }
    return counts.unread_keys | {label: rows for label, rows in others.items() if rows}
