"""What to do if a data set loses too many rows, or all: it depends on the most frequent reason."""

from collections import Counter
from pathlib import Path

SOURCES_NAMED = 10

NEARLY_ALL = 0.9
"""From this share of the rows on, the fault is not one of single rows."""


def advice(lost: Counter[str], asked_for: int, sources: Counter[str], quarantine: Path, *, none_left: bool) -> str:
    """Give the next step.

    lost: the rows that are too many, by reason. asked_for: all rows but those left out on purpose.
    sources: those of the rows that were left out for their source.
    quarantine: the data set's file of rejected rows, in the data set's own folder.
    none_left: whether no row is kept at all, so that allowing more rejects does not help.
    """
    settings = f"datasets.{quarantine.parent.name}"
    # The rows that were not drawn say nothing about those that were.
    reasons = Counter({reason: count for reason, count in lost.items() if reason != "not_sampled"})
    leading = max(reasons, key=reasons.__getitem__, default="")
    match leading:
        case "text_only":
            return (
                f"if the rows have no pictures, set {settings}.modality: text; if a picture is under another "
                f"key than image or images, name that key: {settings}.columns"
            )
        case "has_picture":
            return f"if the rows have pictures, set {settings}.modality: image and {settings}.image_roots"
        case "source_left_out":
            return f"name sources that the rows have, {_some(sources)}, or remove this key: {settings}.sources"
        case "bad_shape" if reasons[leading] >= NEARLY_ALL * asked_for:
            return (
                f"choose the kind that has these rows' keys: {settings}.kind; or map its keys to those "
                f"of your file: {settings}.columns; the rows are in {quarantine}"
            )
    look = f"look at {quarantine}; fix the rows in a copy of it ({settings}.mended), or fix the picture roots"
    return look if none_left else f"{look}, or allow more rejects ({settings}.max_reject_share)"


def _some(sources: Counter[str]) -> str:
    named = ", ".join(f"{source} ({count})" for source, count in sources.most_common(SOURCES_NAMED))
    return named + (f" and {len(sources) - SOURCES_NAMED} more" if len(sources) > SOURCES_NAMED else "")
