"""Which way to the pictures of a source costs the fewest bytes, said before it is gone."""

from collections.abc import Collection
from typing import NamedTuple

from vlmflow.config.picture_sources import PictureSource

ARCHIVE_SHARE = 1 / 3
"""Share of an archive from which on it is brought whole: it then goes on after a break at the very byte, and its
owner's digest can be checked; thousands of ranges are no quicker."""

WHY_ARCHIVE = "a third or more of the archive is needed"

EXCHANGE_BYTES = 700
"""Headers of a request and its answer, as they are usual."""

DIRECTORY_ENTRY = 46 + 24
"""Bytes of a member in a zip's directory beside its name: the record, and the times that most packers add."""

LOCAL_HEADER = 30
"""Bytes before a member's name."""


class Way(NamedTuple):
    """A way to the pictures of a source.

    kind: ranges, whole, or one by one. bytes: what it will cost, headers included, about; None where not known.
    why: for a person.
    """

    kind: str
    bytes: int | None
    why: str


def ways_to(source: PictureSource, members: Collection[str], directory_is_here: bool) -> list[Way]:
    """Give the ways to some pictures of a source, the one that costs the fewest bytes first.

    members: the wanted pictures' names. directory_is_here: the archive's directory needs not be read again.
    """
    if source.form in ("tar", "parquet"):
        return [Way("whole", source.size, f"a {source.form} can only be read from its beginning")]
    estimates = _estimates(source, members, directory_is_here)
    if source.one_by_one is None:
        return [Way("ranges", estimates.get("ranges"), "there is no address for single pictures")]
    if source.archive is None:
        return [Way("one by one", estimates.get("one by one"), "there is no archive")]
    if not estimates or source.pictures is None:
        why = "size and number of pictures of the archive are not known"
        return [Way("ranges", None, why), Way("one by one", None, why)]
    if len(members) >= ARCHIVE_SHARE * source.pictures:
        return [
            Way("whole", source.size, WHY_ARCHIVE),
            Way("one by one", estimates["one by one"], "the archive did not work"),
        ]
    best, other = sorted(estimates, key=lambda kind: estimates[kind])
    why = f"{other} it would be about {estimates[other] / 1e6:,.1f} MB"
    return [Way(best, estimates[best], why), Way(other, estimates[other], f"{best} did not work")]


def _estimates(source: PictureSource, members: Collection[str], directory_is_here: bool) -> dict[str, int]:
    """Give the bytes of both ways, from the mean size of a picture; nothing where it is not known."""
    if source.size is None or source.pictures is None:
        return {}
    count = len(members)
    names = sum(len(member.encode()) for member in members)
    content = count * source.size / source.pictures
    directory = 0 if directory_is_here else source.pictures * (DIRECTORY_ENTRY + names / max(1, count))
    requests = count * (1 - min(count, source.pictures) / source.pictures) + 1  # neighbours come in one
    return {
        "ranges": round(content + directory + count * LOCAL_HEADER + names + requests * EXCHANGE_BYTES),
        "one by one": round(content + count * EXCHANGE_BYTES),
    }


def should_fetch_archive(wanted_bytes: int, archive_bytes: int) -> bool:
    """Tell whether so much of an archive is wanted that it is brought whole."""
    return wanted_bytes >= ARCHIVE_SHARE * archive_bytes
