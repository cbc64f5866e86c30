"""Fetches the pictures that a split's rows name and no root has, from their sources."""

import errno
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from vlmflow.archives.fetch_counts import FetchAccount, FetchedPictures
from vlmflow.archives.fetch_progress import FetchProgress
from vlmflow.archives.fetch_source import SourceFetch
from vlmflow.archives.in_threads import in_threads
from vlmflow.archives.open_archives import require_pins
from vlmflow.archives.picture_file import write_picture
from vlmflow.archives.places import Place, Places
from vlmflow.config.picture_sources import PictureSource
from vlmflow.config.pins import Pin
from vlmflow.core.errors import PassingError, VlmflowError
from vlmflow.core.files import locked
from vlmflow.pictures.image_manifest import Unusable
from vlmflow.pictures.paths import HOUSEKEEPING, picture_name
from vlmflow.pictures.roots import PictureRoots
from vlmflow.web.missing import Missing

logger = logging.getLogger(__name__)

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
