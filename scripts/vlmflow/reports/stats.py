"""What `stats.json`, a data set's account, says: for the pages, the model card and the summary."""

from typing import Any

from vlmflow.config import raw_forms
from vlmflow.pictures.image_manifest import REASONS as PICTURE_REASONS
from vlmflow.rows.rejects import LEFT_OUT, REASONS


def raw_splits(stats: dict[str, Any]) -> list[str]:
    """Give the raw splits of which `stats.json` gives an account."""
    return [name for name in ("train", "test") if name in stats]


def form_of(stats: dict[str, Any]) -> str:
    """Say in a few words what the rows of a data set are made of."""
    has_form = "form" in raw_forms.form_of(stats["kind"]).settings
    return f"{stats['form']} form" if has_form else f"rows of kind {stats['kind']}"


def went(counts: dict[str, Any]) -> tuple[int, int, int, int]:
    """Give the rows of a raw split: all, kept, rejected, left out; the first is the sum of the others."""
    return (
        counts["rows_in"],
        counts["kept"],
        sum(rejects(counts).values()),
        sum(rows_left_out(counts).values()),
    )


def rejects(counts: dict[str, Any]) -> dict[str, int]:
    """Give the rejected rows of a raw split (its part of `stats.json`) by reason, without those left out on purpose."""
    return {reason: count for reason, count in counts["rejected"].items() if reason not in LEFT_OUT}


def rows_left_out(counts: dict[str, Any]) -> dict[str, int]:
    """Give the rows of a raw split that the configuration does not ask for, by reason."""
    return {reason: count for reason, count in counts["rejected"].items() if reason in LEFT_OUT}


def unread(stats: dict[str, Any], split: str) -> dict[str, int]:
    """Give what of a raw split's rows was not read, with the number of rows: keys first, by their names."""
    found = stats["unread"][split]
    ignored = found.get("ignored_keys", {})
    further, dropped = found.get("further_unread_keys", 0), found.get("unanswered_last_turns", 0)
    return {
        **found.get("unread_keys", {}),
        **({"further keys, each counted separately": further} if further else {}),
        **{f"{key}, if it changes what the row means (ignore_keys)": count for key, count in ignored.items()},
        **({"unanswered last turn, dropped": dropped} if dropped else {}),
    }


def explain(reason: str) -> str:
    """Say what a reason for rejecting a row means."""
    return REASONS.get(reason) or PICTURE_REASONS.get(reason.removeprefix("picture_"), "")
