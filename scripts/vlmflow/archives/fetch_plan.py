"""Chooses, before anything is fetched, the way to a source's pictures that costs the fewest bytes."""

from collections.abc import Collection
from typing import NamedTuple

from vlmflow.config.picture_sources import PictureSource

ARCHIVE_SHARE = 1 / 3
"""If at least this share of an archive is wanted, all of it is fetched: a break then resumes at the exact byte, and the
owner's digest can be checked. Thousands of ranges are no faster."""

WHY_ARCHIVE = "a third or more of the archive is needed"

EXCHANGE_BYTES = 700
"""Typical bytes of headers of a request and its answer."""

DIRECTORY_ENTRY = 46 + 24
"""Bytes of a member in a zip's directory without its name: the record, and the times that most packers add."""

LOCAL_HEADER = 30
"""Bytes before a member's name."""


class Way(NamedTuple):
    """A way to the pictures of a source.

    kind: ranges, whole, or one by one. bytes: the estimated cost, with headers; None if unknown.
    why: for people.
    """

    kind: str
    bytes: int | None
    why: str


def ways_to(source: PictureSource, members: Collection[str], directory_is_here: bool) -> list[Way]:
    """Return the ways to some pictures of a source, the one with the fewest bytes first.

    members: the wanted pictures' names. directory_is_here: whether the archive's directory is already on disk.
    """
    if source.form in ("tar", "parquet"):
        return [Way("whole", source.size, f"a {source.form} can only be read from its beginning")]
    estimates = _estimates(source, members, directory_is_here)
    if source.one_by_one is None:
        return [Way("ranges", estimates.get("ranges"), "the source has no address for single pictures")]
    if source.archive is None:
        return [Way("one by one", estimates.get("one by one"), "the source has no archive")]
    if not estimates or source.pictures is None:
        why = "the archive's size and number of pictures are unknown"
        return [Way("ranges", None, why), Way("one by one", None, why)]
    if len(members) >= ARCHIVE_SHARE * source.pictures:
        return [
            Way("whole", source.size, WHY_ARCHIVE),
            Way("one by one", estimates["one by one"], "fetching the archive failed"),
        ]
    best, other = sorted(estimates, key=lambda kind: estimates[kind])
    why = f"{other} would take about {estimates[other] / 1e6:,.1f} MB"
    return [Way(best, estimates[best], why), Way(other, estimates[other], f"{best} failed")]


def _estimates(source: PictureSource, members: Collection[str], directory_is_here: bool) -> dict[str, int]:
    """Return the bytes of both ways, from the mean size of a picture; {} if it is unknown."""
    if source.size is None or source.pictures is None:
        return {}
    count = len(members)
    names = sum(len(member.encode()) for member in members)
    content = count * source.size / source.pictures
    directory = 0 if directory_is_here else source.pictures * (DIRECTORY_ENTRY + names / max(1, count))
    requests = count * (1 - min(count, source.pictures) / source.pictures) + 1  # neighbours share one
    return {
        "ranges": round(content + directory + count * LOCAL_HEADER + names + requests * EXCHANGE_BYTES),
        "one by one": round(content + count * EXCHANGE_BYTES),
    }


def should_fetch_archive(wanted_bytes: int, archive_bytes: int) -> bool:
    """Return whether enough of an archive is wanted to fetch all of it."""
    return wanted_bytes >= ARCHIVE_SHARE * archive_bytes
