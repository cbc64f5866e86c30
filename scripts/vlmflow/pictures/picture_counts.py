"""Counts the pictures that a split names: the usable ones, and the rows that the others cost."""

from collections.abc import Iterable

import msgspec

from vlmflow.pictures.image_manifest import PictureEntry

NO_FOLDER = "no folder"
"""The source of pictures whose paths have no folder."""


class PictureCost(msgspec.Struct):
    """The cost of a fault: the pictures that have it, and the rows that name them."""

    pictures: int = 0
    rows: int = 0


class PictureCounts(msgspec.Struct):
    """The pictures of a raw split, in `stats.json`."""

    named: int = 0
    """Different paths that rows name."""

    usable: int = 0

    formats: dict[str, int] = {}
    """The usable pictures by format, as detected from their bytes."""

    rewritten: dict[str, int] = {}
    """The usable pictures that were rewritten, by reason."""

    unusable: dict[str, PictureCost] = {}
    """By reason."""

    missing_by_source: dict[str, PictureCost] = {}
    """The missing ones of these, by the first folder of their path, or NO_FOLDER."""

    other_names: dict[str, int] = {}
    """The usable pictures whose files have other names than the rows give them, by what differs."""

    first_frames: dict[str, int] = {}
    """The usable pictures whose files have several frames, pages or sizes, of which only the first (of an icon, the
    largest) is used, by format."""


class NotChecked(PictureCounts, omit_defaults=True):
    """The counts of a split with unchecked pictures: `{}` in `stats.json`."""


def picture_counts(pictures: Iterable[PictureEntry]) -> PictureCounts:
    """Count the pictures of one manifest; keys are sorted."""
    counts = PictureCounts()
    for picture in pictures:
        counts.named += 1
        if picture.reason is None:
            counts.usable += 1
            _count(counts.formats, picture.format or "unknown")
            if picture.rewritten:
                _count(counts.rewritten, picture.rewritten)
            if picture.differs:
                _count(counts.other_names, picture.differs)
            if picture.first_frame:
                _count(counts.first_frames, picture.format or "unknown")
            continue
        _charge(counts.unusable, picture.reason, picture)
        if picture.reason == "missing":
            folder, slash, _ = picture.path.replace("\\", "/").partition("/")
            _charge(counts.missing_by_source, folder if slash else NO_FOLDER, picture)
    named, usable, *tables = msgspec.structs.astuple(counts)
    return PictureCounts(named, usable, *(dict(sorted(table.items())) for table in tables))


def _count(table: dict[str, int], key: str) -> None:
    table[key] = table.get(key, 0) + 1


def _charge(table: dict[str, PictureCost], key: str, picture: PictureEntry) -> None:
    cost = table.setdefault(key, PictureCost())
    cost.pictures += 1
    cost.rows += picture.rows
