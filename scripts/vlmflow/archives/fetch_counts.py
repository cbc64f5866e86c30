"""The account of a fetch: for every source the pictures wanted, had, fetched and missing, and the bytes."""

import logging

import msgspec

from vlmflow.archives.fetch_plan import Way
from vlmflow.core.printable import counted
from vlmflow.pictures.picture_counts import PictureCost
from vlmflow.web.missing import REASONS, Missing

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
