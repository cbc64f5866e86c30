"""What the table says of a picture source: which pictures it has, what each way to them costs, and its archives."""

import fnmatch
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from vlmflow.config.source import HubSource, parse_source
from vlmflow.config.tables import PictureSource, Pin, pin_of
from vlmflow.core.errors import VlmflowError
from vlmflow.fetch import hub
from vlmflow.fetch.from_hub import pinned, require_pinned
from vlmflow.fetch.remote_file import Digests, RemoteFile
from vlmflow.fetch.transport import Transport
from vlmflow.pictures.manifest import spellings

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


class Place(NamedTuple):
    """A place from which a picture can be fetched.

    source: its row's name in the table of sources. member: its name in the archive. name: its path in the store.
    """

    source: str
    member: str
    name: str


class Places:
    """Finds places of pictures by the beginnings of their paths.

    sources: by name.
    """

    def __init__(self, sources: Mapping[str, PictureSource]) -> None:
        beginnings = [
            (beginning, name, pattern)
            for name, source in sources.items()
            for beginning, pattern in (source.members or {}).items()
        ]
        self._beginnings = sorted(beginnings, key=lambda item: -len(item[0]))

    def of(self, path: str) -> list[Place]:
        """Return the places from which a picture may be fetched, the likeliest first; [] if no source matches.

        path: normalised (`picture_name`). A picture of COCO is found by its number, in any year's split.
        """
        places = []
        for spelling in spellings(path):
            for beginning, source, pattern in self._beginnings:
                if spelling.startswith(beginning):
                    rest = spelling.removeprefix(beginning)
                    member = pattern.replace("{rest}", rest).replace("{name}", rest.rpartition("/")[2])
                    places.append(Place(source, member, spelling))
                    break
        return places


class Way(NamedTuple):
    """A way to the pictures of a source.

    name: ranges, whole, or one by one. bytes: the estimated cost, with headers; None if unknown. why: for people.
    """

    name: str
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
    best, other = sorted(estimates, key=lambda name: estimates[name])
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
    # Neighbours share one.
    requests = count * (1 - min(count, source.pictures) / source.pictures) + 1
    return {
        "ranges": round(content + directory + count * LOCAL_HEADER + names + requests * EXCHANGE_BYTES),
        "one by one": round(content + count * EXCHANGE_BYTES),
    }


def require_pins(sources: Mapping[str, PictureSource], pins: Mapping[str, Pin]) -> None:
    """Raise VlmflowError for the first archive on the hub without a commit in pins.yaml."""
    for source in sources.values():
        if source.archive and (address := _on_hub(source.archive)):
            pinned(address, pin_of(source.archive, pins))


def open_archives(
    source: PictureSource, pins: Mapping[str, Pin], transport: Transport
) -> list[tuple[RemoteFile, Digests]]:
    """Return the files of a source's archive, open for reading, with their digests.

    This is one file, unless an address on the hub names several parquet files by `*`.
    Raises Refused if the server refuses one, VlmflowError if one is not pinned or the server fails too often.
    """
    archive = source.archive
    assert archive is not None, "a source without an archive is fetched one by one"
    if (address := _on_hub(archive)) is None:
        remote = RemoteFile(archive, lambda: archive, transport, source.size)
        archives: list[tuple[RemoteFile, Digests]] = [(remote, {"md5": source.md5})]
    else:
        pin, revision = pinned(address, pin_of(archive, pins))
        _, files = hub.describe(address, revision)
        files = [file for file in files if fnmatch.fnmatchcase(file.path, address.path or "")]
        if not files:
            raise VlmflowError(f"{address}: there is no such file at {revision}", "check it in picture_sources.yaml")
        sha256 = files[0].sha256 if len(files) == 1 else None
        require_pinned(address, pin, size=sum(file.size for file in files), sha256=sha256)
        archives = []
        for file in files:
            remote = RemoteFile(str(file), partial(hub.address_of, file), transport, file.size, file.etag)
            archives.append((remote, {"sha256": file.sha256, "md5": source.md5}))
    for remote, _ in archives:
        remote.open()
    return archives


def _on_hub(archive: str) -> HubSource | None:
    if not archive.startswith("hf://"):
        return None
    source = parse_source(archive)
    if isinstance(source, Path) or source.path is None:
        raise VlmflowError(f"{archive} is a model, not a data set's file", "use hf://datasets/OWNER/NAME/FILE")
    return source
