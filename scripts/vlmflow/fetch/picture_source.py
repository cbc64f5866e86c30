"""Chooses, before anything is fetched, the way to a source's pictures that costs the fewest bytes.

Plans and fetches all wanted pictures of one source.
"""

import difflib
import logging
import os
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from vlmflow.config.tables import PictureSource, Pin
from vlmflow.core.files import unfinished
from vlmflow.core.patience import PassingFault
from vlmflow.fetch.open_archives import Digests, FetchProgress, fetch_archive, in_threads, name_on_disk, open_archives
from vlmflow.fetch.packed_files import Content, parquet_members, tar_members
from vlmflow.fetch.remote_file import RemoteFile
from vlmflow.fetch.transport import CONNECTIONS, Answer, Missing, Refused, Transport, host_of
from vlmflow.fetch.zip_files import (
    Member,
    Range,
    Read,
    content_of,
    kept_directory,
    ranges_of,
    read_members,
    refuse_unreadable,
)

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


HEADERS = {"accept-encoding": "identity", "user-agent": "vlmflow"}

logger = logging.getLogger(__name__)

Give = Callable[[str, Content], Missing | None]
"""Takes a picture's name in the archive and its bytes, and saves it; returns why it cannot, or None."""


@dataclass
class SourceFetch:
    """The fetch of the wanted pictures of one source.

    name: the source's name. pins: those of archives on the hub. wanted: the pictures' names in the archive.
    give: called with each fetched picture. folder: for directories and whole archives. max_bytes: the limit of a
    picture. progress: counts bytes and pictures.

    way: the chosen way; None before `plan`, and if there is none.
    fetched, missing: the result for `wanted`, after `run`.
    bytes_wanted: of the pictures, packed as in the archive.
    transport: of all requests. Once it is stopped, waiting and receiving threads end soon, with Stopped.
    """

    name: str
    source: PictureSource
    pins: Mapping[str, Pin]
    wanted: list[str]
    give: Give
    folder: Path
    max_bytes: int
    progress: FetchProgress
    way: Way | None = None
    fetched: set[str] = field(default_factory=set)
    missing: dict[str, Missing] = field(default_factory=dict)
    bytes_wanted: int = 0

    def __post_init__(self) -> None:
        self.transport = Transport(self.progress)
        self._lock = threading.Lock()
        self._archives: list[tuple[RemoteFile, Digests]] = []
        self._members: dict[str, Member] = {}

    def plan(self) -> None:
        """Choose the way; asks the server as far as needed to know its bytes.

        Raises VlmflowError if a server fails too often. If the source refuses everything, all pictures are missing.
        """
        self._ways = ways_to(self.source, self.wanted, self._directory_file.is_file())
        if self.wanted:
            self._take_next_way()

    def run(self) -> None:
        """Fetch what is wanted; if the first way gives nothing, try the other one, if any.

        Raises VlmflowError if a server fails too often or a file changed, OSError if the disk fails.
        """
        while self.way is not None:
            try:
                {"ranges": self._run_ranges, "whole": self._run_archives, "one by one": self._run_one_by_one}[
                    self.way.kind
                ]()
            except Refused as refusal:
                self.miss_the_rest(refusal.missing)
            except BaseException:
                self.transport.stop()
                raise
            if self.fetched or not self._ways:
                return
            why = next((missing.detail for missing in self.missing.values()), "no reason known")
            logger.warning("%s: fetching by %s brought no picture (%s)", self.name, self.way.kind, why)
            self._take_next_way()

    def miss_the_rest(self, missing: Missing) -> None:
        """Count as missing what was not fetched and has no other reason yet."""
        for name in self.wanted:
            if name not in self.fetched:
                self.missing.setdefault(name, missing)

    # --- the plan ---------------------------------------------------------------------------------------------

    @property
    def _directory_file(self) -> Path:
        return self.folder / f"{self.name}.directory.json"

    @property
    def _archive_folder(self) -> Path:
        """The folder for whole archives of the source, while they are downloaded and read."""
        return self.folder / self.name

    def _take_next_way(self) -> None:
        self.way = None
        while self._ways and self.way is None:
            way = self._ways.pop(0)
            self.missing.clear()
            try:
                self.way = way if way.kind == "one by one" else self._open(way)
            except Refused as refusal:
                self.miss_the_rest(refusal.missing)
                logger.warning("%s: %s", self.name, refusal.missing.detail)

    def _open(self, way: Way) -> Way:
        self._archives = self._archives or open_archives(self.source, self.pins, self.transport)
        size = sum(remote.length for remote, _ in self._archives)
        if self.source.form != "zip":
            self.bytes_wanted = size
            return Way("whole", size, way.why)
        remote, _ = self._archives[0]
        whole = name_on_disk(remote, self._archive_folder)
        if whole.exists() or unfinished(whole).exists():
            here = (whole if whole.exists() else unfinished(whole)).stat().st_size
            return Way("whole", remote.length - here, f"{here / 1e6:,.1f} MB of it are already here")
        if not remote.takes_ranges:
            return Way("whole", remote.length, "its server does not support ranges")
        key = f"{remote.name} {remote.version} {remote.length}"
        self._find_members(kept_directory(self._directory_file, key, remote.read, remote.length).members)
        if should_fetch_archive(self.bytes_wanted, remote.length):
            return Way("whole", remote.length, WHY_ARCHIVE)
        self._ranges = ranges_of(self._members)
        return Way("ranges", sum(span.end - span.start for span in self._ranges), way.why)

    def _find_members(self, members: Mapping[str, Member]) -> None:
        """Find the wanted members in a zip's directory; absent and invalid ones are missing."""
        self._members = {}
        for name in self.wanted:
            try:
                if name not in members:
                    raise Refused("no_member", f"{self.source.archive} has no member {name!r}")
                refuse_unreadable(members[name], self.max_bytes)
                self._members[name] = members[name]
            except Refused as refusal:
                self.missing[name] = refusal.missing
        self.bytes_wanted = sum(member.packed for member in self._members.values())
        lacking = [name for name, missing in self.missing.items() if missing.reason == "no_member"]
        if members and len(lacking) == len(self.wanted):
            nearest = difflib.get_close_matches(self.wanted[0], list(members)[:10_000], n=3, cutoff=0.3)
            logger.warning(
                "%s: the archive has none of its names, for example %r; it has %s; fix `members` of this source",
                self.name,
                self.wanted[0],
                ", ".join(nearest or list(members)[:3]),
            )

    # --- the ways ---------------------------------------------------------------------------------------------

    def _run_ranges(self) -> None:
        self._read_ranges(self._archives[0][0].read)

    def _run_archives(self) -> None:
        found: set[str] = set()
        self._archive_folder.mkdir(parents=True, exist_ok=True)
        self._forget_other_versions()
        for remote, digests in self._archives:
            archive = name_on_disk(remote, self._archive_folder)
            fetch_archive(remote, archive, digests)
            if self.source.form == "zip":
                self._unpack_zip(archive, remote.length)
            else:
                found |= self._unpack_stream(archive)
            archive.unlink()
        if self.source.form != "zip":
            for name in set(self.wanted) - found:
                self.missing[name] = Missing("no_member", f"{self.source.archive} has no member {name!r}")

    def _forget_other_versions(self) -> None:
        here = {name_on_disk(remote, self._archive_folder) for remote, _ in self._archives}
        for other in set(self._archive_folder.iterdir()) - here - set(map(unfinished, here)):
            logger.info("%s: removing %s, an archive of another version", self.name, other)
            other.unlink()

    def _run_one_by_one(self) -> None:
        address = self.source.one_by_one
        assert address is not None, "this way is planned only with an address"

        def bring(member: str) -> None:
            try:
                content = _fetch_one(address, member, self.transport, self.max_bytes)
            except Refused as refusal:
                self._settle(member, refusal.missing)
            else:
                self._settle(member, self.give(member, content))
                sizes.append(len(content))

        sizes: list[int] = []
        in_threads(self.wanted, bring, CONNECTIONS, self.transport.stop)
        self.bytes_wanted = sum(sizes)

    def _unpack_zip(self, archive: Path, size: int) -> None:
        descriptor = os.open(archive, os.O_RDONLY)
        try:

            def read(start: int, end: int) -> bytes:
                return os.pread(descriptor, end - start, start)

            self._find_members(read_members(read, size))
            self._ranges = ranges_of(self._members)
            self._read_ranges(read)
        finally:
            os.close(descriptor)

    def _unpack_stream(self, archive: Path) -> set[str]:
        wanted = set(self.wanted)
        if self.source.form == "tar":
            contents = tar_members(archive, wanted, self.max_bytes)
        else:
            column = self.source.picture_column or "image"
            contents = parquet_members(archive, wanted, self.max_bytes, column, self.source.name_column)
        found = set()
        for name, content in contents:
            found.add(name)
            self._settle(name, content if isinstance(content, Missing) else self.give(name, content))
        return found

    def _read_ranges(self, read: Read) -> None:
        def bring(span: Range) -> None:
            content = memoryview(read(span.start, span.end))
            for name in span.names:
                member = self._members[name]
                packed = content[member.start - span.start : member.end - span.start]
                self._settle(name, self._unpack(name, packed, read))

        in_threads(self._ranges, bring, CONNECTIONS, self.transport.stop)

    def _unpack(self, name: str, packed: memoryview, read: Read) -> Missing | None:
        member = self._members[name]
        try:
            content = content_of(packed, member)
        except Refused:
            try:  # read it again: was the transfer damaged, or the archive?
                content = content_of(memoryview(read(member.start, member.end)), member)
            except Refused as refusal:
                return refusal.missing
        return self.give(name, content)

    def _settle(self, name: str, missing: Missing | None) -> None:
        with self._lock:
            if missing is None:
                self.missing.pop(name, None)
                self.fetched.add(name)
            else:
                self.missing[name] = missing
            self.progress.pictures += 1


def _fetch_one(base: str, member: str, transport: Transport, max_bytes: int) -> bytes:
    """Return the bytes of one picture from the address `base` + `member`.

    Raises Refused if the server refuses it or it is too large, VlmflowError if the server fails too often; Stopped.
    """
    address = base + quote(member)
    blocks: list[bytes] = []
    size = 0

    def take(block: bytes) -> None:
        nonlocal size
        blocks.append(block)
        size += len(block)
        if size > max_bytes:
            raise Refused("too_large", f"more than {max_bytes:,} bytes")

    def attempt() -> None:
        nonlocal size
        transport.discount(size)
        blocks.clear()
        size = 0
        transport.get(address, HEADERS, _accept, take)
        if not blocks:
            raise PassingFault(f"{host_of(base)} sent an empty file")

    transport.patiently(f"{base}{member}", attempt)
    return b"".join(blocks)


def _accept(answer: Answer) -> None:
    if problem := answer.problem(200):
        raise answer.fault(problem) if answer.may_pass else Refused("refused", problem)
