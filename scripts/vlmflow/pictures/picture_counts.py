"""What became of the pictures that a split names: how many are usable, and what the others cost."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from vlmflow.pictures.image_manifest import PictureEntry

NO_FOLDER = "no folder"
"""The source of pictures whose paths name no folder."""


def picture_counts(pictures: Iterable[PictureEntry]) -> dict[str, Any]:
    """Count the pictures of one manifest, for `stats.json`.

    Gives the paths named, those usable, how many were rewritten and why, the formats as sniffed; for every
    reason why a picture cannot be used the pictures and the rows that it costs; and the missing ones by source
    (the path's first folder, or NO_FOLDER).
    """
    counts: Counter[str] = Counter()
    rewritten: Counter[str] = Counter()
    formats: Counter[str] = Counter()
    unusable: dict[str, Counter[str]] = {}
    missing: dict[str, Counter[str]] = {}
    for picture in pictures:
        counts["named"] += 1
        if picture.reason is None:
            counts["usable"] += 1
            formats[picture.format or "unknown"] += 1
            if picture.rewritten:
                rewritten[picture.rewritten] += 1
            continue
        _cost(unusable, picture.reason, picture)
        if picture.reason == "missing":
            folder, slash, _ = picture.path.replace("\\", "/").partition("/")
            _cost(missing, folder if slash else NO_FOLDER, picture)
    return {
        "named": counts["named"],
        "usable": counts["usable"],
        "formats": _plain(formats),
        "rewritten": _plain(rewritten),
        "unusable": {reason: _plain(cost) for reason, cost in sorted(unusable.items())},
        "missing_by_source": {source: _plain(cost) for source, cost in sorted(missing.items())},
    }


def _cost(table: dict[str, Counter[str]], key: str, picture: PictureEntry) -> None:
    cost = table.setdefault(key, Counter())
    cost["pictures"] += 1
    cost["rows"] += picture.rows


def _plain(counter: Counter[str]) -> dict[str, int]:
    return dict(sorted(counter.items()))
