"""The account of a fetch: of every source how many pictures were wanted, had, fetched and missing, and the bytes."""

import logging
from collections.abc import Mapping
from typing import Any

import msgspec

from vlmflow.archives.fetch_plan import Way
from vlmflow.config.picture_sources import PictureSource
from vlmflow.web.missing import REASONS, Missing

NO_SOURCE = "none"
"""Stands for the source of pictures that no source has."""

logger = logging.getLogger(__name__)


class Cost(msgspec.Struct):
    """What a reason costs: pictures, the rows that name them, and one of them with its detail."""

    pictures: int = 0
    rows: int = 0
    example: str = ""
    detail: str = ""


class SourceAccount(msgspec.Struct):
    """One source; the pictures wanted are those had, fetched and missing together.

    ways: how they were fetched, and why so. had: were in a root before. missing: by reason.
    bytes_wanted: of the fetched pictures as they lie in the archive. bytes_transferred: of all content that came.
    """

    licence: str | None = None
    ways: list[str] = []
    had: int = 0
    fetched: int = 0
    missing: dict[str, Cost] = {}
    bytes_wanted: int = 0
    bytes_transferred: int = 0

    @property
    def wanted(self) -> int:
        """Pictures that rows name and this source should have."""
        return self.had + self.fetched + sum(cost.pictures for cost in self.missing.values())


class FetchAccount:
    """What became of every picture that the rows name."""

    def __init__(self, sources: Mapping[str, PictureSource]) -> None:
        self._sources = sources
        self.by_source: dict[str, SourceAccount] = {}

    def of(self, source: str | None) -> SourceAccount:
        """Give the account of a source; None is for pictures that no source has."""
        name = source or NO_SOURCE
        if name not in self.by_source:
            self.by_source[name] = SourceAccount(licence=self._sources[name].licence if source else None)
        return self.by_source[name]

    def plan(self, source: str, way: Way, pictures: int) -> None:
        """Say and keep how the pictures of a source will be fetched."""
        size = "of unknown size" if way.bytes is None else f"{way.bytes / 1e6:,.1f} MB"
        text = f"{pictures:,} pictures, {way.kind}, {size}: {way.why}"
        logger.info("%s: %s", source, text)
        self.of(source).ways.append(text)

    def miss(self, source: str | None, name: str, rows: int, missing: Missing) -> None:
        """Count a picture that could not be fetched."""
        cost = self.of(source).missing.setdefault(missing.reason, Cost(example=name, detail=missing.detail))
        cost.pictures += 1
        cost.rows += rows

    def say(self) -> None:
        """Log what is missing, and what it costs."""
        for name, source in sorted(self.by_source.items()):
            logger.info(
                "%s: %d pictures, %d had, %d fetched, %.1f MB for %.1f",
                *(name, source.wanted, source.had, source.fetched),
                *(source.bytes_transferred / 1e6, source.bytes_wanted / 1e6),
            )
            for reason, cost in sorted(source.missing.items()):
                logger.warning(
                    "%s: %d pictures, %d rows: %s (%s), as %s: %s",
                    *(name, cost.pictures, cost.rows, reason, REASONS[reason], cost.example, cost.detail),
                )

    def as_json(self) -> dict[str, Any]:
        """Give the account for `images/DATASET/SPLIT.fetched.json`: totals, and by source."""
        accounts = self.by_source.values()
        costs = [cost for account in accounts for cost in account.missing.values()]
        return {
            "wanted": sum(account.wanted for account in accounts),
            "had": sum(account.had for account in accounts),
            "fetched": sum(account.fetched for account in accounts),
            "missing": {"pictures": sum(cost.pictures for cost in costs), "rows": sum(cost.rows for cost in costs)},
            "bytes_wanted": sum(account.bytes_wanted for account in accounts),
            "bytes_transferred": sum(account.bytes_transferred for account in accounts),
            "sources": {
                name: {"wanted": account.wanted, **msgspec.to_builtins(account)}
                for name, account in sorted(self.by_source.items())
            },
        }
