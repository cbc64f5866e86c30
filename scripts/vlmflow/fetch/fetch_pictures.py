"""The account of a fetch: for every source the pictures wanted, had, fetched and missing, and the bytes.

Fetches the pictures that a split's rows name and no root has, from their sources.
"""

import errno
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from vlmflow.config.tables import PictureSource, Pin
from vlmflow.core.errors import PassingError, VlmflowError, counted
from vlmflow.core.files import locked
from vlmflow.fetch.open_archives import FetchProgress, Place, Places, in_threads, require_pins
from vlmflow.fetch.packed_files import write_picture
from vlmflow.fetch.picture_source import SourceFetch, Way
from vlmflow.fetch.transport import REASONS, Missing
from vlmflow.pictures.manifest import HOUSEKEEPING, PictureCost, Unusable, picture_name
from vlmflow.pictures.roots import PictureRoots

NO_SOURCE = "none"
"""The name for pictures without a source."""

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


class FetchAccount:
    """Counts the result for every picture that the rows name."""

    def __init__(self) -> None:
        self.by_source: dict[str, SourceAccount] = {}

    def of(self, source: str | None) -> SourceAccount:
        """Return the account of a source; None stands for pictures without a source."""
        name = source or NO_SOURCE
        return self.by_source.setdefault(name, SourceAccount())

    def plan(self, source: str, way: Way, pictures: int) -> None:
        """Log and record how the pictures of a source will be fetched."""
        size = "of unknown size" if way.bytes is None else f"{way.bytes / 1e6:,.1f} MB"
        text = f"{counted(pictures, 'picture')}, {way.kind}, {size}: {way.why}"
        logger.info("%s: %s", source, text)
        self.of(source).ways.append(text)

    def miss(self, source: str | None, name: str, rows: int, missing: Missing) -> None:
        """Count a picture that could not be fetched."""
        cost = self.of(source).missing.setdefault(missing.reason, Cost(example=name, detail=missing.detail))
        cost.pictures += 1
        cost.rows += rows

    def close(self) -> FetchedPictures:
        """Return the account, and log the missing pictures with the rows that name them."""
        for name, source in sorted(self.by_source.items()):
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
        accounts = self.by_source.values()
        costs = [cost for account in accounts for cost in account.missing.values()]
        return FetchedPictures(
            wanted=sum(account.wanted for account in accounts),
            had=sum(account.had for account in accounts),
            fetched=sum(account.fetched for account in accounts),
            missing=PictureCost(sum(cost.pictures for cost in costs), sum(cost.rows for cost in costs)),
            bytes_wanted=sum(account.bytes_wanted for account in accounts),
            bytes_transferred=sum(account.bytes_transferred for account in accounts),
            sources=dict(sorted(self.by_source.items())),
        )


TRY_ELSEWHERE = {"no_member", "refused"}
"""Reasons after which the next possible source of a picture is tried."""


@dataclass
class Wish:
    """A picture that rows name and no root has.

    rows: their number. places: the places not tried yet.
    """

    rows: int
    places: list[Place]


@dataclass
class PictureFetch:
    """One fetch for one split.

    sources: by name. pins: those of archives on the hub. store: the folder for pictures, with paths as rows name them.
    max_bytes: the limit of a picture. what: the work, for people.
    """

    sources: Mapping[str, PictureSource]
    pins: Mapping[str, Pin]
    store: Path
    max_bytes: int
    what: str
    _account: FetchAccount = field(default_factory=FetchAccount, init=False)
    _failures: list[VlmflowError] = field(default_factory=list, init=False)

    def fetch(self, paths: Mapping[str, int], roots: PictureRoots) -> FetchedPictures:
        """Fetch what the roots lack, and return the account.

        paths: distinct paths as rows write them, with the number of rows. roots: the store is one of them.

        Raises VlmflowError if an archive is not pinned, before anything is fetched; PassingError if the disk is full;
        and either if servers failed too often, after everything else is fetched.
        """
        wishes = self._wishes(paths, roots)
        asked = {place.source for wish in wishes.values() for place in wish.places}
        require_pins({name: self.sources[name] for name in sorted(asked)}, self.pins)
        try:
            with FetchProgress(self.what) as progress:
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
        account = self._account.close()
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
            found = roots.locate(path)
            if isinstance(found, Unusable) and found.reason != "missing":
                continue  # resolve_images says why
            name = picture_name(path)
            if isinstance(name, Unusable):
                continue  # as above
            if name not in named:
                named[name] = Wish(0, places.of(name))
            named[name].rows += rows
            if not isinstance(found, Unusable):
                here.add(name)
        wishes = {}
        for name, wish in named.items():
            source = wish.places[0].source if wish.places else None
            if name in here:
                self._account.of(source).had += 1
            elif reachable := [place for place in wish.places if _can_be_fetched(self.sources[place.source])]:
                wishes[name] = Wish(wish.rows, reachable)
            elif source is None:
                missing = Missing("no_source", "add one to picture_sources (config), or a root to image_roots")
                self._account.miss(None, name, wish.rows, missing)
            else:
                how = self.sources[source].by_hand or "its address is unknown"
                self._account.miss(source, name, wish.rows, Missing("by_hand", how))
        return wishes

    def _round(self, wishes: Mapping[str, Wish], progress: FetchProgress) -> dict[str, Wish]:
        """Fetch every wish from its likeliest source; returns the wishes that remain for other sources."""
        by_source: dict[str, dict[str, list[str]]] = {}
        for name, wish in wishes.items():
            place = wish.places[0]
            by_source.setdefault(place.source, {}).setdefault(place.member, []).append(name)
        with ExitStack() as locks:
            for source in sorted(by_source):
                # The other split's fetch then finds what this one fetched.
                lock = self.store / HOUSEKEEPING / f"{source}.lock"
                locks.enter_context(locked(lock, f"{source}: another process fetches from it; waiting"))
            fetches = {}
            for source, members in sorted(by_source.items()):
                in_store = {member: wishes[names[0]].places[0].name for member, names in members.items()}
                fetches[source] = self._fetch_of(source, in_store, progress)
            self._plan(list(fetches.values()))
            ways = [fetch.way for fetch in fetches.values() if fetch.way]
            sizes = [way.bytes for way in ways if way.bytes is not None]
            progress.total = progress.count + sum(sizes) if len(sizes) == len(ways) else 0
            left: dict[str, Wish] = {}
            for source, fetch in fetches.items():
                with self._failing(fetch):
                    fetch.run()
                account = self._account.of(source)
                account.bytes_wanted += fetch.bytes_wanted
                account.bytes_transferred += fetch.transport.received
                for member, names in by_source[source].items():
                    for name in names:
                        self._settle(name, wishes[name], fetch, member, left)
        return left

    def _fetch_of(self, source: str, in_store: Mapping[str, str], progress: FetchProgress) -> SourceFetch:
        """Return the fetch from one source. in_store: paths in the store by names in the archive."""
        wanted = [member for member, name in in_store.items() if not (self.store / name).is_file()]
        return SourceFetch(
            source,
            self.sources[source],
            self.pins,
            wanted,
            lambda member, content: write_picture(self.store / in_store[member], content),
            self.store / HOUSEKEEPING,
            self.max_bytes,
            progress,
        )

    def _plan(self, fetches: Sequence[SourceFetch]) -> None:
        """Plan all sources in parallel, so that servers that do not answer do not add up."""

        def plan(fetch: SourceFetch) -> None:
            with self._failing(fetch):
                fetch.plan()

        def stop() -> None:
            for fetch in fetches:
                fetch.transport.stop()

        in_threads(fetches, plan, len(fetches), stop)
        for fetch in fetches:
            if fetch.way:
                self._account.plan(fetch.name, fetch.way, len(fetch.wanted))

    def _settle(self, name: str, wish: Wish, fetch: SourceFetch, member: str, left: dict[str, Wish]) -> None:
        missing = fetch.missing.get(member)
        if missing is None:
            if member in fetch.fetched:
                self._account.of(fetch.name).fetched += 1
            else:  # another process fetched it while this one waited
                self._account.of(fetch.name).had += 1
        elif missing.reason in TRY_ELSEWHERE and len(wish.places) > 1:
            left[name] = Wish(wish.rows, wish.places[1:])
        else:
            self._account.miss(fetch.name, name, wish.rows, missing)

    @contextmanager
    def _failing(self, fetch: SourceFetch) -> Iterator[None]:
        """Raise a failure only at the end: one source's server must not prevent fetches from others."""
        try:
            yield
        except VlmflowError as error:
            logger.warning("%s", error.cause)
            self._failures.append(error)
            fetch.miss_the_rest(Missing("failed", error.cause))


def _can_be_fetched(source: PictureSource) -> bool:
    return source.by_hand is None and (source.archive or source.one_by_one) is not None
