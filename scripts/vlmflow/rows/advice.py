"""What to do where a data set loses too many of its rows, or all of them: it depends on the reason that leads."""

from collections import Counter
from pathlib import Path

SOURCES_NAMED = 10

NEARLY_ALL = 0.9
"""From this share of the rows on, what is wrong with them is no fault of single rows."""


def advice(lost: Counter[str], asked_for: int, sources: Counter[str], quarantine: Path, *, none_left: bool) -> str:
    """Give the next step.

    lost: the rows that are too many, by reason. asked_for: all rows but those left out on purpose.
    sources: those of the rows that were left out for their source.
    quarantine: the data set's file of rejected rows, in the data set's own folder.
    none_left: whether no row is kept at all, so that allowing more rejects is no way out.
    """
    settings = f"datasets.{quarantine.parent.name}"
    # The rows that were not drawn say nothing about those that were.
    reasons = Counter({reason: count for reason, count in lost.items() if reason != "not_sampled"})
    leading = max(reasons, key=reasons.__getitem__, default="")
    match leading:
        case "text_only":
            return (
                f"where the rows have no pictures, say {settings}.modality: text; where a picture stands under another "
                f"key than image or images, name it: {settings}.columns"
            )
        case "has_picture":
            return f"where the rows have pictures, say {settings}.modality: image, and name {settings}.image_roots"
        case "source_left_out":
            return f"name sources that the rows are of, {_some(sources)}, or take this key away: {settings}.sources"
        case "bad_shape" if reasons[leading] >= NEARLY_ALL * asked_for:
            return (
                f"choose the kind that has the keys of these rows: {settings}.kind; or say what its keys are called "
                f"in your file: {settings}.columns; the rows stand in {quarantine}"
            )
    look = f"look at {quarantine}; correct the rows in a copy of it ({settings}.mended), or the picture roots"
    return look if none_left else f"{look}, or allow more rejects ({settings}.max_reject_share)"


def _some(sources: Counter[str]) -> str:
    named = ", ".join(f"{source} ({count})" for source, count in sources.most_common(SOURCES_NAMED))
    return named + (f" and {len(sources) - SOURCES_NAMED} more" if len(sources) > SOURCES_NAMED else "")
