"""Fetches the pictures that a split's rows name and no root has, from their sources, and accounts for each."""

import errno
import logging
import mmap
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from vlmflow.config.tables import PictureSource, Pin
from vlmflow.core.errors import PassingError, VlmflowError, counted
from vlmflow.core.files import locked, unfinished
from vlmflow.core.progress import in_threads
from vlmflow.fetch.archives import Content
from vlmflow.fetch.picture_source import Place, Places, require_pins
from vlmflow.fetch.source_fetch import FetchProgress, SourceFetch
from vlmflow.fetch.transport import REASONS, Missing
from vlmflow.pictures.manifest import HOUSEKEEPING, PictureCost, Unusable, picture_name
from vlmflow.pictures.roots import PictureRoots

NO_SOURCE = "none"
"""The name for pictures without a source."""

TRY_ELSEWHERE = {"no_member", "refused"}
"""Reasons after which the next possible source of a picture is tried."""

logger = logging.getLogger(__name__)


class Cost(PictureCost):
    """The pictures and rows lost for one reason, with one of the pictures and its detail."""

    example: str = ""
    detail: str = ""


class SourceAccount(msgspec.Struct):
    """The result for the pictures of one source."""

    wanted: int = 0
    """Pictures that rows name and this source should have: those had, fetched and missing. Counted at the end."""

    ways: list[str] = []
    """How they were fetched, and why."""

    had: int = 0
    """Pictures that were already in a root."""

    fetched: int = 0

    missing: dict[str, Cost] = {}
    """By reason."""

    bytes_wanted: int = 0
    """Of the fetched pictures, packed as in the archive."""

    bytes_transferred: int = 0
    """Of all received content."""


class FetchedPictures(msgspec.Struct):
    """The content of `images/DATASET/SPLIT.fetched.json`: the sums over all sources, and each source."""

    wanted: int
    had: int
    fetched: int
    missing: PictureCost
    bytes_wanted: int
    bytes_transferred: int
    sources: dict[str, SourceAccount]


@dataclass
class Wish:
    """A picture that rows name and no root has. rows: their number. places: the places not tried yet."""

    rows: int
    places: list[Place]


@dataclass
class PictureFetch:
    """One fetch for one split.

    sources: by name. pins: those of archives on the hub. store: the folder for pictures, with paths as rows name them.
    max_bytes: the limit of a picture. label: the work, for people.
    """

    sources: Mapping[str, PictureSource]
    pins: Mapping[str, Pin]
    store: Path
    max_bytes: int
    label: str
    _accounts: dict[str, SourceAccount] = field(default_factory=dict, init=False)
    _failures: list[VlmflowError] = field(default_factory=list, init=False)

    def fetch(self, paths: Mapping[str, int], roots: PictureRoots) -> FetchedPictures:
        """Fetch what the roots lack, and return the account.

        paths: distinct paths as rows write them, with the number of rows. roots: the store is one of them.

        Raises VlmflowError if an archive is not pinned, before anything is fetched; PassingError if the disk is full;
        and either if servers failed too often, after everything else is fetched.
        """
        wishes = self._wishes(paths, roots)
        named = {entry.source for wish in wishes.values() for entry in wish.places}
        require_pins({name: self.sources[name] for name in sorted(named)}, self.pins)
        try:
            with FetchProgress(self.label) as progress:
                progress.total_pictures = len(wishes)
                while wishes:
                    wishes = self._round(wishes, progress)
        except OSError as error:
            next_step = "check that this path exists and is writable"
            if error.errno == errno.ENOSPC:
                next_step = "free some space there, or put stores.fetched_pictures on a larger disk"
            raise PassingError(
                f"{error.filename or self.store}: {error.strerror}",
                f"{next_step}, and run the same command again: it keeps the fetched pictures",
            ) from None
        account = self._close()
        if self._failures:
            passing = all(isinstance(error, PassingError) for error in self._failures)
            raise (PassingError if passing else VlmflowError)(
                "\n".join(error.cause for error in self._failures),
                "; ".join(dict.fromkeys(error.next_step for error in self._failures)),
            )
        return account

    def _wishes(self, paths: Mapping[str, int], roots: PictureRoots) -> dict[str, Wish]:
        """Return what to fetch, by path; count what is already here, and what cannot be fetched."""
        places = Places(self.sources)
        named: dict[str, Wish] = {}
        here: set[str] = set()
        for path, rows in paths.items():
            located, name = roots.locate(path), picture_name(path)
            if (isinstance(located, Unusable) and located.reason != "missing") or isinstance(name, Unusable):
                continue  # resolve_images says why
            if name not in named:
                named[name] = Wish(0, places.of(name))
            named[name].rows += rows
            if not isinstance(located, Unusable):
                here.add(name)
        wishes = {}
        for name, wish in named.items():
            source = wish.places[0].source if wish.places else None
            if name in here:
                self._account(source).had += 1
            elif reachable := [entry for entry in wish.places if _can_be_fetched(self.sources[entry.source])]:
                wishes[name] = Wish(wish.rows, reachable)
            elif source is None:
                how = "add one to picture_sources (config), or a root to image_roots"
                self._miss(None, name, wish.rows, Missing("no_source", how))
            else:
                how = self.sources[source].by_hand or "its address is unknown"
                self._miss(source, name, wish.rows, Missing("by_hand", how))
        return wishes

    def _round(self, wishes: Mapping[str, Wish], progress: FetchProgress) -> dict[str, Wish]:
        """Fetch every wish from its likeliest source; returns the wishes that remain for other sources."""
        by_source: dict[str, dict[str, list[str]]] = {}
        for name, wish in wishes.items():
            entry = wish.places[0]
            by_source.setdefault(entry.source, {}).setdefault(entry.member, []).append(name)
        with ExitStack() as locks:
            for source in sorted(by_source):
                # The other split's fetch then finds what this one fetched.
                lock = self.store / HOUSEKEEPING / f"{source}.lock"
                locks.enter_context(locked(lock, f"{source}: another process fetches from it; waiting"))
            fetches = []
            for source, members in sorted(by_source.items()):
                in_store = {member: self.store / wishes[names[0]].places[0].name for member, names in members.items()}
                fetches.append(self._fetch_of(source, in_store, progress))
            self._plan(fetches)
            ways = [fetch.way for fetch in fetches if fetch.way]
            sizes = [way.bytes for way in ways if way.bytes is not None]
            progress.total = progress.count + sum(sizes) if len(sizes) == len(ways) else 0
            left: dict[str, Wish] = {}
            for fetch in fetches:
                with self._failing(fetch):
                    fetch.run()
                account = self._account(fetch.name)
                account.bytes_wanted += fetch.bytes_wanted
                account.bytes_transferred += fetch.transport.received
                for member, names in by_source[fetch.name].items():
                    for name in names:
                        self._settle(name, wishes[name], fetch, member, left)
        return left

    def _fetch_of(self, source: str, in_store: Mapping[str, Path], progress: FetchProgress) -> SourceFetch:
        """Return the fetch from one source. in_store: files in the store by names in the archive."""

        def write(member: str, content: Content) -> Missing | None:
            return write_picture(in_store[member], content)

        wanted = [member for member, file in in_store.items() if not file.is_file()]
        request = (source, self.sources[source], self.pins, wanted)
        return SourceFetch(*request, write, self.store / HOUSEKEEPING, self.max_bytes, progress)

    def _plan(self, fetches: Sequence[SourceFetch]) -> None:
        """Plan all sources in parallel, so that servers that do not answer do not add up; log and record each way."""

        def plan(fetch: SourceFetch) -> None:
            with self._failing(fetch):
                fetch.plan()

        def stop() -> None:
            for fetch in fetches:
                fetch.transport.stop()

        in_threads(fetches, plan, len(fetches), stop)
        for fetch in fetches:
            if way := fetch.way:
                size = "of unknown size" if way.bytes is None else f"{way.bytes / 1e6:,.1f} MB"
                text = f"{counted(len(fetch.wanted), 'picture')}, {way.name}, {size}: {way.why}"
                logger.info("%s: %s", fetch.name, text)
                self._account(fetch.name).ways.append(text)

    @contextmanager
    def _failing(self, fetch: SourceFetch) -> Iterator[None]:
        """Raise a failure only at the end: one source's server must not prevent fetches from others."""
        try:
            yield
        except VlmflowError as error:
            logger.warning("%s", error.cause)
            self._failures.append(error)
            fetch.miss_the_rest(Missing("failed", error.cause))

    def _settle(self, name: str, wish: Wish, fetch: SourceFetch, member: str, left: dict[str, Wish]) -> None:
        missing = fetch.missing.get(member)
        if missing is None:
            if member in fetch.fetched:
                self._account(fetch.name).fetched += 1
            else:  # another process fetched it while this one waited
                self._account(fetch.name).had += 1
        elif missing.reason in TRY_ELSEWHERE and len(wish.places) > 1:
            left[name] = Wish(wish.rows, wish.places[1:])
        else:
            self._miss(fetch.name, name, wish.rows, missing)

    def _account(self, source: str | None) -> SourceAccount:
        """Return the account of a source; None stands for pictures without a source."""
        return self._accounts.setdefault(source or NO_SOURCE, SourceAccount())

    def _miss(self, source: str | None, name: str, rows: int, missing: Missing) -> None:
        """Count a picture that could not be fetched."""
        cost = self._account(source).missing.setdefault(missing.reason, Cost(example=name, detail=missing.detail))
        cost.pictures += 1
        cost.rows += rows

    def _close(self) -> FetchedPictures:
        """Return the account, and log the missing pictures with the rows that name them."""
        sources = dict(sorted(self._accounts.items()))
        for name, source in sources.items():
            source.wanted = source.had + source.fetched + sum(cost.pictures for cost in source.missing.values())
            logger.info(
                "%s: %d pictures, %d already here, %d fetched; received %.1f MB for %.1f MB of pictures",
                *(name, source.wanted, source.had, source.fetched),
                *(source.bytes_transferred / 1e6, source.bytes_wanted / 1e6),
            )
            for reason, cost in sorted(source.missing.items()):
                logger.warning(
                    "%s: %d pictures, %d rows: %s (%s), for example %s: %s",
                    *(name, cost.pictures, cost.rows, reason, REASONS[reason], cost.example, cost.detail),
                )
        costs = [cost for source in sources.values() for cost in source.missing.values()]
        missing = PictureCost(sum(cost.pictures for cost in costs), sum(cost.rows for cost in costs))
        keys = ("wanted", "had", "fetched", "bytes_wanted", "bytes_transferred")
        sums = {key: sum(getattr(source, key) for source in sources.values()) for key in keys}
        return FetchedPictures(missing=missing, sources=sources, **sums)


def _can_be_fetched(source: PictureSource) -> bool:
    return source.by_hand is None and (source.archive or source.one_by_one) is not None


WRITE_ANEW = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
BUFFER_BYTES = 1 << 20

_own = threading.local()


def write_picture(file: Path, content: Content) -> Missing | None:
    """Write a picture completely or not at all, synced to disk; returns why it cannot have its name, or None.

    The caller must have locked the picture's source: `whole_file`'s own lock and buffer would cost more than the write.
    Raises OSError if the disk fails.
    """
    part = unfinished(file)
    try:
        try:
            _write(part, content)
        except FileNotFoundError:
            file.parent.mkdir(parents=True, exist_ok=True)
            _write(part, content)
        part.rename(file)
    except (NotADirectoryError, FileExistsError, IsADirectoryError):
        with suppress(NotADirectoryError):
            part.unlink(missing_ok=True)
        return Missing("name_conflict", f"{file.name!r} would be below a file, or has the name of a folder")
    except OSError as error:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        error.filename = error.filename or str(file)
        raise
    return None


def _write(part: Path, content: Content) -> None:
    """Write to disk without the page cache, if the file system allows it: a file that is synced at once does not gain.

    Allocating its pages took as long as all other work on a picture (docs/benchmarks.md).
    """
    try:
        _write_through(part, content, os.O_DIRECT)
    except OSError as error:
        # open(2): a file system without O_DIRECT says so, perhaps later.
        if error.errno != errno.EINVAL:
            raise
        _write_through(part, content, 0)


def _write_through(part: Path, content: Content, direct: int) -> None:
    if not hasattr(_own, "pages"):
        # Aligned to a page, as O_DIRECT requires.
        _own.pages = memoryview(mmap.mmap(-1, BUFFER_BYTES))
    buffer: memoryview = _own.pages
    descriptor = os.open(part, WRITE_ANEW | direct, 0o666)
    try:
        for start in range(0, len(content), len(buffer)):
            block = content[start : start + len(buffer)]
            buffer[: len(block)] = block
            rest = buffer[: -(-len(block) // mmap.PAGESIZE) * mmap.PAGESIZE]
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        os.ftruncate(descriptor, len(content))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
