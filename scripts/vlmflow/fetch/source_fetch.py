"""Plans and fetches all wanted pictures of one source, by the way that costs the fewest bytes."""

import difflib
import logging
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from vlmflow.config.tables import PictureSource, Pin
from vlmflow.core.files import unfinished
from vlmflow.core.patience import PassingFault
from vlmflow.core.progress import Progress, amount, in_threads
from vlmflow.fetch import archives
from vlmflow.fetch.archives import Content, Member, Range, Read, content_of, ranges_of
from vlmflow.fetch.picture_source import ARCHIVE_SHARE, WHY_ARCHIVE, Way, open_archives, ways_to
from vlmflow.fetch.remote_file import Digests, RemoteFile, fetch_whole, name_on_disk
from vlmflow.fetch.transport import CONNECTIONS, Answer, Missing, Refused, Transport, host_of

logger = logging.getLogger(__name__)

Give = Callable[[str, Content], Missing | None]
"""Takes a picture's name in the archive and its bytes, and saves it; returns why it cannot, or None."""


class FetchProgress(Progress):
    """Counts received bytes, for rate and time left, and complete pictures.

    label: the stage and its subject. `total` and `total_pictures` are set after planning; `total` may be an estimate,
    and is hidden once it is exceeded.
    """

    def __init__(self, label: str) -> None:
        super().__init__(label, 0, "bytes")
        self.pictures = 0
        self.total_pictures = 0

    def line(self, seconds: float) -> str:
        """Return the report after `seconds` of work."""
        if self.count > self.total:
            self.total = 0
        rate = amount(self.pictures / seconds if seconds > 0 else 0.0, "pictures")
        return f"{super().line(seconds)} · {self.pictures:,} of {self.total_pictures:,} pictures · {rate}/s"


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
        self._directory_file = self.folder / f"{self.name}.directory.json"
        self._archive_folder = self.folder / self.name
        """For whole archives of the source, while they are downloaded and read."""
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

    def _take_next_way(self) -> None:
        self.way = None
        while self._ways and self.way is None:
            way = self._ways.pop(0)
            self.missing.clear()
            try:
                self.way = way if way.name == "one by one" else self._open(way)
            except Refused as refusal:
                self.miss_the_rest(refusal.missing)
                logger.warning("%s: %s", self.name, refusal.missing.detail)

    def _open(self, way: Way) -> Way:
        """Open the archives, and return the way with its bytes, or a better one."""
        self._archives = self._archives or open_archives(self.source, self.pins, self.transport)
        if self.source.form != "zip":
            self.bytes_wanted = sum(remote.length for remote, _ in self._archives)
            return Way("whole", self.bytes_wanted, way.why)
        remote, _ = self._archives[0]
        archive = name_on_disk(remote, self._archive_folder)
        for file in (archive, unfinished(archive)):
            if file.exists():
                here = file.stat().st_size
                return Way("whole", remote.length - here, f"{here / 1e6:,.1f} MB of it are already here")
        if not remote.takes_ranges:
            return Way("whole", remote.length, "its server does not support ranges")
        key = f"{remote.name} {remote.version} {remote.length}"
        self._find_members(archives.kept_members(self._directory_file, key, remote.read, remote.length))
        if self.bytes_wanted >= ARCHIVE_SHARE * remote.length:
            return Way("whole", remote.length, WHY_ARCHIVE)
        return Way("ranges", sum(span.end - span.start for span in ranges_of(self._members)), way.why)

    def _find_members(self, members: Mapping[str, Member]) -> None:
        """Find the wanted members in a zip's directory; absent and invalid ones are missing."""
        self._members = {}
        for name in self.wanted:
            try:
                if name not in members:
                    raise Refused("no_member", f"{self.source.archive} has no member {name!r}")
                archives.refuse_unreadable(members[name], self.max_bytes)
                self._members[name] = members[name]
            except Refused as refusal:
                self.missing[name] = refusal.missing
        self.bytes_wanted = sum(member.packed for member in self._members.values())
        if members and all(name not in members for name in self.wanted):
            nearest = difflib.get_close_matches(self.wanted[0], list(members)[:10_000], n=3, cutoff=0.3)
            logger.warning(
                "%s: the archive has none of its names, for example %r; it has %s; fix `members` of this source",
                self.name,
                self.wanted[0],
                ", ".join(nearest or list(members)[:3]),
            )

    def run(self) -> None:
        """Fetch what is wanted; if the first way gives nothing, try the other one, if any.

        Raises VlmflowError if a server fails too often or a file changed, OSError if the disk fails.
        """
        while self.way is not None:
            try:
                if self.way.name == "ranges":
                    self._read_ranges(self._archives[0][0].read)
                elif self.way.name == "whole":
                    self._fetch_archives()
                else:
                    self._fetch_one_by_one()
            except Refused as refusal:
                self.miss_the_rest(refusal.missing)
            except BaseException:
                self.transport.stop()
                raise
            if self.fetched or not self._ways:
                return
            why = next((missing.detail for missing in self.missing.values()), "no reason known")
            logger.warning("%s: fetching by %s brought no picture (%s)", self.name, self.way.name, why)
            self._take_next_way()

    def _fetch_archives(self) -> None:
        """Fetch whole archives, and read the pictures out of them."""
        self._archive_folder.mkdir(parents=True, exist_ok=True)
        files = {name_on_disk(remote, self._archive_folder) for remote, _ in self._archives}
        for other in set(self._archive_folder.iterdir()) - files - set(map(unfinished, files)):
            logger.info("%s: removing %s, an archive of another version", self.name, other)
            other.unlink()
        present: set[str] = set()
        for remote, digests in self._archives:
            archive = name_on_disk(remote, self._archive_folder)
            fetch_whole(remote, archive, digests)
            if self.source.form == "zip":
                self._unpack_zip(archive, remote.length)
            else:
                present |= self._unpack_stream(archive)
            archive.unlink()
        if self.source.form != "zip":
            for name in set(self.wanted) - present:
                self.missing[name] = Missing("no_member", f"{self.source.archive} has no member {name!r}")

    def _unpack_zip(self, archive: Path, size: int) -> None:
        with archive.open("rb") as file:

            def read(start: int, end: int) -> bytes:
                return os.pread(file.fileno(), end - start, start)

            self._find_members(archives.read_members(read, size))
            self._read_ranges(read)

    def _unpack_stream(self, archive: Path) -> set[str]:
        """Read a tar or parquet file, and return the names of the wanted pictures in it."""
        wanted, source = set(self.wanted), self.source
        if source.form == "tar":
            contents = archives.tar_members(archive, wanted, self.max_bytes)
        else:
            column = source.picture_column or "image"
            contents = archives.parquet_members(archive, wanted, self.max_bytes, column, source.name_column)
        present = set()
        for name, content in contents:
            present.add(name)
            self._settle(name, content if isinstance(content, Missing) else self.give(name, content))
        return present

    def _read_ranges(self, read: Read) -> None:
        """Read the wanted members of a zip by ranges of its bytes."""

        def fetch(span: Range) -> None:
            content = memoryview(read(span.start, span.end))
            for name in span.names:
                member = self._members[name]
                packed = content[member.start - span.start : member.end - span.start]
                try:
                    try:
                        picture = content_of(packed, member)
                    except Refused:  # read it again: was the transfer damaged, or the archive?
                        picture = content_of(memoryview(read(member.start, member.end)), member)
                except Refused as refusal:
                    self._settle(name, refusal.missing)
                else:
                    self._settle(name, self.give(name, picture))

        in_threads(ranges_of(self._members), fetch, CONNECTIONS, self.transport.stop)

    def _fetch_one_by_one(self) -> None:
        address = self.source.one_by_one
        assert address is not None, "this way is planned only with an address"
        sizes: list[int] = []

        def fetch(member: str) -> None:
            try:
                picture = _fetch_one(address, member, self.transport, self.max_bytes)
            except Refused as refusal:
                self._settle(member, refusal.missing)
            else:
                self._settle(member, self.give(member, picture))
                sizes.append(len(picture))

        in_threads(self.wanted, fetch, CONNECTIONS, self.transport.stop)
        self.bytes_wanted = sum(sizes)

    def _settle(self, name: str, missing: Missing | None) -> None:
        with self._lock:
            if missing is None:
                self.missing.pop(name, None)
                self.fetched.add(name)
            else:
                self.missing[name] = missing
            self.progress.pictures += 1

    def miss_the_rest(self, missing: Missing) -> None:
        """Count as missing what was not fetched and has no other reason yet."""
        for name in self.wanted:
            if name not in self.fetched:
                self.missing.setdefault(name, missing)


def _fetch_one(base: str, member: str, transport: Transport, max_bytes: int) -> bytes:
    """Return the bytes of one picture from the address `base` + `member`.

    Raises Refused if the server refuses it or it is too large, VlmflowError if the server fails too often; Stopped.
    """
    headers = {"accept-encoding": "identity", "user-agent": "vlmflow"}
    content = bytearray()

    def accept(answer: Answer) -> None:
        if problem := answer.problem(200):
            raise answer.fault(problem) if answer.may_pass else Refused("refused", problem)

    def take(block: bytes) -> None:
        content.extend(block)
        if len(content) > max_bytes:
            raise Refused("too_large", f"more than {max_bytes:,} bytes")

    def attempt() -> None:
        transport.discount(len(content))
        content.clear()
        transport.get(base + quote(member), headers, accept, take)
        if not content:
            raise PassingFault(f"{host_of(base)} sent an empty file")

    transport.patiently(f"{base}{member}", attempt)
    return bytes(content)
