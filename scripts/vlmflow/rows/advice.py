"""The next step if a data set loses too many rows, or all: it depends on the most frequent reason."""

from collections import Counter
from pathlib import Path

SOURCES_NAMED = 10

NEARLY_ALL = 0.9
"""If at least this share of the requested rows has a bad shape, the settings are probably wrong, not single rows."""


def advice(lost: Counter[str], asked_for: int, sources: Counter[str], quarantine: Path, *, none_left: bool) -> str:
    """Return the next step, for an error message.

    lost: the number of lost rows by reason. asked_for: the number of requested rows.
    sources: the sources that are not requested, with their numbers of rows.
    quarantine: the file of rejected rows, in the data set's own folder.
    none_left: whether no row is kept, so that allowing more rejects does not help.
    """
    settings = f"datasets.{quarantine.parent.name}"
    # A row that was not drawn has no fault.
    reasons = Counter({reason: count for reason, count in lost.items() if reason != "not_sampled"})
    leading = max(reasons, key=reasons.__getitem__, default="")
    match leading:
        case "text_only":
            return (
                f"if the rows have no pictures, remove {settings}.modality; if a picture is under another key than "
                f"image or images, name that key: {settings}.columns"
            )
        case "has_picture":
            return f"if the rows have pictures, remove {settings}.modality, and set {settings}.image_roots"
        case "source_left_out":
            return f"name sources that the rows have, {_some(sources)}, or remove this key: {settings}.sources"
        case "not_taken":
            return f"remove {settings}.take: no row has a label that calls its answer a good one"
        case "no_good_attempt":
            return f"lower {settings}.min_score: no attempt of these rows has that score"
        case "picture_path_outside":
            return (
                f"name pictures relative to a folder of {settings}.image_roots: an absolute path outside "
                f"of these, an address or '..' leads out of it; the rows are in {quarantine}"
            )
        case "special_token":
            return (
                "take the marks out of the texts: reasoning (<think>…</think>) is read at the beginning of answers "
                f"only, and tool calls in turns or keys of their own; the rows are in {quarantine}"
            )
        case "bad_shape" if reasons[leading] >= NEARLY_ALL * asked_for:
            return (
                f"choose the kind that has these rows' keys: {settings}.kind; or map its keys to those "
                f"of your file: {settings}.columns; the rows are in {quarantine}"
            )
    look = (
        f"look at {quarantine}; fix the rows in a copy of it ({settings}.fixed_rows), or, if their pictures are the "
        f"reason, {settings}.image_roots"
    )
    return look if none_left else f"{look}, or allow more rejects ({settings}.max_reject_share)"


def _some(sources: Counter[str]) -> str:
    named = ", ".join(f"{source} ({count})" for source, count in sources.most_common(SOURCES_NAMED))
    return named + (f" and {len(sources) - SOURCES_NAMED} more" if len(sources) > SOURCES_NAMED else "")
