"""Plans and fetches all wanted pictures of one source."""

import difflib
import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from vlmflow.archives.archive_copy import fetch_archive
from vlmflow.archives.fetch_plan import WHY_ARCHIVE, Way, should_fetch_archive, ways_to
from vlmflow.archives.fetch_progress import FetchProgress
from vlmflow.archives.in_threads import in_threads
from vlmflow.archives.one_by_one import fetch_one
from vlmflow.archives.open_archives import Digests, name_on_disk, open_archives
from vlmflow.archives.packed_files import parquet_members, tar_members
from vlmflow.archives.picture_file import Content
from vlmflow.archives.zip_directory import Member, Read, kept_directory, read_members
from vlmflow.archives.zip_members import Range, content_of, ranges_of, refuse_unreadable
from vlmflow.config.picture_sources import PictureSource
from vlmflow.config.pins import Pin
from vlmflow.core.files import unfinished
from vlmflow.web.missing import Missing, Refused
from vlmflow.web.remote_file import RemoteFile
from vlmflow.web.transport import CONNECTIONS, Transport

logger = logging.getLogger(__name__)

Give = Callable[[str, Content], Missing | None]
"""Takes a picture's name in the archive and its bytes, and saves it; returns why it cannot, or None."""


class SourceFetch:
    """The fetch of the wanted pictures of one source.

    name: the source's name. wanted: the pictures' names in the archive. give: called with each fetched picture.
    folder: for directories and whole archives. max_bytes: the limit of a picture. progress: counts bytes and pictures.

    way: the chosen way; None before `plan`, and if there is none.
    fetched, missing: the result for `wanted`, after `run`.
    bytes_wanted: of the pictures, packed as in the archive. bytes_transferred: of all received content.
    """

    def __init__(
        self,
        name: str,
        source: PictureSource,
        wanted: Iterable[str],
        give: Give,
        folder: Path,
        max_bytes: int,
        progress: FetchProgress,
    ) -> None:
        self.name = name
        self.wanted = list(wanted)
        self.fetched: set[str] = set()
        self.missing: dict[str, Missing] = {}
        self.bytes_wanted = 0
        self.way: Way | None = None
        self._source = source
        self._give = give
        self._folder = folder
        self._max_bytes = max_bytes
        self._progress = progress
        self._transport = Transport(progress)
        self._lock = threading.Lock()
        self._archives: list[tuple[RemoteFile, Digests]] = []
        self._members: dict[str, Member] = {}

    def plan(self, pins: Mapping[str, Pin]) -> None:
        """Choose the way; asks the server as far as needed to know its bytes.

        Raises VlmflowError if a server fails too often. If the source refuses everything, all pictures are missing.
        """
        self._ways = ways_to(self._source, self.wanted, self._directory_is_here())
        if self.wanted:
            self._take_next_way(pins)

    def run(self, pins: Mapping[str, Pin]) -> None:
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
                self.stop()
                raise
            if self.fetched or not self._ways:
                return
            why = next((missing.detail for missing in self.missing.values()), "no reason known")
            logger.warning("%s: fetching by %s brought no picture (%s)", self.name, self.way.kind, why)
            self._take_next_way(pins)

    def stop(self) -> None:
        """Make waiting and receiving threads end soon, with Stopped."""
        self._transport.stop()

    def miss_the_rest(self, missing: Missing) -> None:
        """Count as missing what was not fetched and has no other reason yet."""
        for name in self.wanted:
            if name not in self.fetched:
                self.missing.setdefault(name, missing)

    @property
    def bytes_transferred(self) -> int:
        """Bytes of content received so far, with those of broken attempts."""
        return self._transport.received

    # --- the plan ---------------------------------------------------------------------------------------------

    def _directory_is_here(self) -> bool:
        return self._directory_file.is_file()

    @property
    def _directory_file(self) -> Path:
        return self._folder / f"{self.name}.directory.json"

    @property
    def _archive_folder(self) -> Path:
        """The folder for whole archives of the source, while they are downloaded and read."""
        return self._folder / self.name

    def _take_next_way(self, pins: Mapping[str, Pin]) -> None:
        self.way = None
        while self._ways and self.way is None:
            way = self._ways.pop(0)
            self.missing.clear()
            try:
                self.way = way if way.kind == "one by one" else self._open(way, pins)
            except Refused as refusal:
                self.miss_the_rest(refusal.missing)
                logger.warning("%s: %s", self.name, refusal.missing.detail)

    def _open(self, way: Way, pins: Mapping[str, Pin]) -> Way:
        self._archives = self._archives or open_archives(self._source, pins, self._transport)
        size = sum(remote.length for remote, _ in self._archives)
        if self._source.form != "zip":
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
                    raise Refused("no_member", f"{self._source.archive} has no member {name!r}")
                refuse_unreadable(members[name], self._max_bytes)
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
            if self._source.form == "zip":
                self._unpack_zip(archive, remote.length)
            else:
                found |= self._unpack_stream(archive)
            archive.unlink()
        if self._source.form != "zip":
            for name in set(self.wanted) - found:
                self.missing[name] = Missing("no_member", f"{self._source.archive} has no member {name!r}")

    def _forget_other_versions(self) -> None:
        here = {name_on_disk(remote, self._archive_folder) for remote, _ in self._archives}
        for other in set(self._archive_folder.iterdir()) - here - set(map(unfinished, here)):
            logger.info("%s: removing %s, an archive of another version", self.name, other)
            other.unlink()

    def _run_one_by_one(self) -> None:
        address = self._source.one_by_one
        assert address is not None, "this way is planned only with an address"

        def bring(member: str) -> None:
            try:
                content = fetch_one(address, member, self._transport, self._max_bytes)
            except Refused as refusal:
                self._settle(member, refusal.missing)
            else:
                self._settle(member, self._give(member, content))
                sizes.append(len(content))

        sizes: list[int] = []
        in_threads(self.wanted, bring, CONNECTIONS, self.stop)
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
        if self._source.form == "tar":
            contents = tar_members(archive, wanted, self._max_bytes)
        else:
            column = self._source.picture_column or "image"
            contents = parquet_members(archive, wanted, self._max_bytes, column, self._source.name_column)
        found = set()
        for name, content in contents:
            found.add(name)
            self._settle(name, content if isinstance(content, Missing) else self._give(name, content))
        return found

    def _read_ranges(self, read: Read) -> None:
        def bring(span: Range) -> None:
            content = memoryview(read(span.start, span.end))
            for name in span.names:
                member = self._members[name]
                packed = content[member.start - span.start : member.end - span.start]
                self._settle(name, self._unpack(name, packed, read))

        in_threads(self._ranges, bring, CONNECTIONS, self.stop)

    def _unpack(self, name: str, packed: memoryview, read: Read) -> Missing | None:
        member = self._members[name]
        try:
            content = content_of(packed, member)
        except Refused:
            try:  # read it again: was the transfer damaged, or the archive?
                content = content_of(memoryview(read(member.start, member.end)), member)
            except Refused as refusal:
                return refusal.missing
        return self._give(name, content)

    def _settle(self, name: str, missing: Missing | None) -> None:
        with self._lock:
            if missing is None:
                self.missing.pop(name, None)
                self.fetched.add(name)
            else:
                self.missing[name] = missing
            self._progress.pictures += 1
