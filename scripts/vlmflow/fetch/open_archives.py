"""Finds the sources of a picture that a row names, and its name in their archives.

Runs work that waits for network and disk in several threads.

Progress of a fetch of pictures: bytes and pictures, their rates, and the time left.

Opens the archives of a source, on any server or on the hub at their pinned commit, and downloads whole ones.
"""

import fnmatch
import hashlib
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

from vlmflow.config.source import HubSource, parse_source
from vlmflow.config.tables import PictureSource, Pin, pin_of
from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import require_free_disk, unfinished
from vlmflow.core.progress import Progress, amount
from vlmflow.fetch import hub
from vlmflow.fetch.from_hub import pinned_revision, require_pinned
from vlmflow.fetch.hub import HubFile
from vlmflow.fetch.remote_file import RemoteFile
from vlmflow.fetch.transport import Transport
from vlmflow.pictures.manifest import spellings


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
        found = []
        for spelling in spellings(path):
            for beginning, source, pattern in self._beginnings:
                if spelling.startswith(beginning):
                    rest = spelling.removeprefix(beginning)
                    member = pattern.replace("{rest}", rest).replace("{name}", rest.rpartition("/")[2])
                    found.append(Place(source, member, spelling))
                    break
        return found


Item = TypeVar("Item")


def in_threads(items: Iterable[Item], work: Callable[[Item], object], threads: int, stop: Callable[[], object]) -> None:
    """Call `work(item)` for every item, in so many threads.

    stop: makes running work end early; called when an item fails.

    Raises the first exception of an item.
    """
    left = iter(list(items))  # threads can share a list's iterator: taking an item is a single call
    errors: list[BaseException] = []

    def fail(error: BaseException) -> None:
        errors.append(error)
        stop()

    def work_on() -> None:
        try:
            for item in left:
                if errors:
                    return
                work(item)
        except BaseException as error:
            fail(error)

    workers = [threading.Thread(target=work_on, daemon=True) for _ in range(threads)]
    for worker in workers:
        worker.start()
    try:
        for worker in workers:
            worker.join()
    except BaseException as interruption:  # this thread was interrupted, and does not wait for the others any more
        fail(interruption)
        raise
    if errors:
        raise errors[0]


class FetchProgress(Progress):
    """Counts received bytes, for rate and time left, and complete pictures.

    what: the stage and its subject. `total` and `total_pictures` are set after planning; `total` may be an estimate,
    and is hidden once it is exceeded. Several threads may count.
    """

    def __init__(self, what: str) -> None:
        super().__init__(what, 0, "bytes")
        self.pictures = 0
        self.total_pictures = 0
        self._lock = threading.Lock()

    def advance(self, units: int = 1) -> None:
        """Count `units` more bytes; a negative number for dropped ones."""
        with self._lock:
            super().advance(units)

    def line(self, seconds: float) -> str:
        """Return the report after `seconds` of work."""
        if self.count > self.total:
            self.total = 0
        rate = self.pictures / seconds if seconds > 0 else 0.0
        return (
            f"{super().line(seconds)} · {self.pictures:,} of {self.total_pictures:,} pictures"
            f" · {amount(rate, 'pictures')}/s"
        )


Digests = dict[str, str | None]
"""The expected digests of an archive by algorithm (md5, sha256); None if unknown."""

logger = logging.getLogger(__name__)


def require_pins(sources: Mapping[str, PictureSource], pins: Mapping[str, Pin]) -> None:
    """Raise VlmflowError for the first archive on the hub without a commit in pins.yaml."""
    for source in sources.values():
        if source.archive and (address := _on_hub(source.archive)):
            pinned_revision(address, pin_of(source.archive, pins))


def open_archives(
    source: PictureSource, pins: Mapping[str, Pin], transport: Transport
) -> list[tuple[RemoteFile, Digests]]:
    """Return the files of a source's archive, open for reading, with their digests.

    This is one file, unless an address on the hub names several parquet files by `*`.
    Raises Refused if the server refuses one, VlmflowError if one is not pinned or the server fails too often.
    """
    archive = source.archive
    assert archive is not None, "a source without an archive is fetched one by one"
    address = _on_hub(archive)
    found: list[tuple[RemoteFile, Digests]]
    if address is None:
        remote = RemoteFile(archive, lambda: archive, transport, source.size)
        found = [(remote, {"md5": source.md5})]
    else:
        pin = pin_of(archive, pins)
        revision = pinned_revision(address, pin)
        assert pin is not None, "pinned_revision refuses what has no pin"
        found = [
            (_hub_file(file, transport), {"sha256": file.sha256, "md5": source.md5})
            for file in _hub_files(address, pin, revision)
        ]
    for remote, _ in found:
        remote.open()
    return found


def name_on_disk(remote: RemoteFile, folder: Path) -> Path:
    """Return the file for an archive in its source's folder; each version has another name."""
    version = "".join(letter for letter in remote.version if letter.isalnum())[:40]
    return folder / f"{version}-{remote.size}-{remote.name.rpartition('/')[2]}"


def fetch_archive(remote: RemoteFile, target: Path, digests: Digests) -> None:
    """Download an archive to `target`, which gets its name only once it is checked; resumes after a break or a kill.

    remote: must be open. target: its name includes the archive's version; an existing file of the right size is kept.
    Only the caller writes there.

    Raises VlmflowError if it does not fit on the disk, or a digest differs; what `RemoteFile.stream` raises.
    """
    if target.is_file() and target.stat().st_size == remote.length:
        return
    part = unfinished(target)
    with part.open("ab") as file:
        if file.tell() > remote.length or not remote.takes_ranges:
            file.truncate(0)
        require_free_disk(target.parent, remote.length - file.tell(), remote.name)
        if file.tell():
            logger.info("%s: resuming at byte %s of %s", remote.name, f"{file.tell():,}", f"{remote.length:,}")
        if file.tell() < remote.length:
            remote.stream(file.tell(), remote.length, file.write, lambda: file.truncate(0))
        file.flush()
    for algorithm, wanted in digests.items():
        if wanted is None:
            continue
        with part.open("rb") as file:
            found = hashlib.file_digest(file, algorithm).hexdigest()
        if found != wanted:
            part.unlink()
            raise VlmflowError(
                f"{remote.name}: the received file has {algorithm} {found}, expected {wanted}",
                "something on the way changes it, or its owner changed it: find out which before you use it",
            )
    part.replace(target)


def _on_hub(archive: str) -> HubSource | None:
    if not archive.startswith("hf://"):
        return None
    source = parse_source(archive)
    if isinstance(source, Path) or source.path is None:
        raise VlmflowError(f"{archive} is a model, not a data set's file", "use hf://datasets/OWNER/NAME/FILE")
    return source


def _hub_files(source: HubSource, pin: Pin, revision: str) -> list[HubFile]:
    _, files = hub.describe(source, revision)
    files = [file for file in files if fnmatch.fnmatchcase(file.path, source.path or "")]
    if not files:
        raise VlmflowError(f"{source}: there is no such file at {revision}", "check it in picture_sources.yaml")
    require_pinned(source, pin, size=sum(file.size for file in files))
    if len(files) == 1:
        require_pinned(source, pin, sha256=files[0].sha256)
    return files


def _hub_file(file: HubFile, transport: Transport) -> RemoteFile:
    return RemoteFile(
        str(file), lambda: hub.look_up(file.source, file.revision, file.path)[1], transport, file.size, file.etag
    )
