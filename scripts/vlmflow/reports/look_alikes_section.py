"""The near-duplicates on the data page: how many, and the nearest of them side by side."""

from heapq import nsmallest
from itertools import count
from pathlib import Path
from typing import Any

from vlmflow.config.row_settings import NearDuplicates, PictureLimits
from vlmflow.reports.thumbnails import thumbnail
from vlmflow.rows.data_rows import lines_of
from vlmflow.rows.near_duplicates import NearDuplicate

SHOWN = 12
THUMBNAIL = 240
"""Pixels of the longer side."""

QUESTION_SHOWN = 300
"""Characters."""


def near_section(
    pairs: Path, store: Path, limits: PictureLimits, settings: NearDuplicates, looked: bool
) -> dict[str, Any]:
    """Give what the page says of near-duplicates.

    pairs: what `find_near_duplicates` wrote. store: the data set's picture store. limits: of its pictures.
    settings: how they were looked for, and whether their train rows were rejected.
    looked: the pictures were compared; there may be none.
    """
    counts = {"pictures": 0, "rows": 0, "same": 0, "questions": 0}

    def counted() -> Any:
        for pair in lines_of(pairs, NearDuplicate):
            if pair.kind == "question":
                counts["questions"] += 1
            else:
                counts["pictures"] += 1
                counts["rows"] += pair.rows
                counts["same"] += pair.same_questions
            yield pair

    numbers = count()
    nearest = nsmallest(SHOWN, counted(), key=lambda pair: (pair.distance, -pair.same_questions, next(numbers)))
    return {
        "words": _words(counts, settings.picture_distance, settings.drop, looked),
        "pairs": [_pair(pair, store, limits) for pair in nearest],
    }


def _words(counts: dict[str, int], distance: int, dropped: bool, looked: bool) -> str:
    became = "were rejected (near_duplicates.drop)." if dropped else "stay (near_duplicates.drop is off)."
    asked = f"Train rows without a picture that ask what a test row asks: {counts['questions']:,}."
    asked += f" These rows {became}" if counts["questions"] else ""
    if not looked:
        return asked + " No pictures were compared."
    none = f"No train picture looks like one of the test split (perceptual hashes within {distance} of 64 bits)."
    pictures = (
        f"Train pictures that look like one of the test split, though their bytes differ (perceptual hashes within "
        f"{distance} of 64 bits): {counts['pictures']:,}. Train rows that name them: {counts['rows']:,}, of which ask "
        f"what the test split asks: {counts['same']:,}. These rows {became}"
    )
    return (pictures if counts["pictures"] else none) + (f" {asked}" if counts["questions"] else "")


def _pair(pair: NearDuplicate, store: Path, limits: PictureLimits) -> dict[str, Any]:
    names = [("train", pair.train), ("test", pair.test)]
    if pair.kind == "question":
        facts = {"pictures": [], "what": "the same question, without a picture", "rows": ""}
    else:
        facts = {
            "pictures": [(thumbnail(store / name, THUMBNAIL, limits), name) for _, name in names],
            "what": f"{pair.distance} of 64 bits apart",
            "rows": f"train rows: {pair.rows:,}, with the same question: {pair.same_questions:,}",
        }
    return {**facts, "names": names, "question": (pair.question or "")[:QUESTION_SHOWN]}
