"""The counts page of `validate_sharegpt`: what happened to every raw row of a data set."""

from dataclasses import dataclass

from vlmflow.pictures.manifest import REASONS as PICTURE_REASONS
from vlmflow.reports.page import Tile, render
from vlmflow.reports.row_account import RowAccount, account_tiles, row_account
from vlmflow.rows.stats import Stats


@dataclass(frozen=True)
class UnusablePictures:
    """The unusable pictures of a raw split with one reason, and the rows that they cost."""

    split: str
    reason: str
    meaning: str
    pictures: int
    rows: int


@dataclass(frozen=True)
class CountsPage:
    """The page's facts. unusable: the costliest reason first."""

    title: str
    subtitle: str
    tiles: list[Tile]
    account: RowAccount
    unusable: list[UnusablePictures]


def counts_page(stats: Stats) -> str:
    """Return the account of a data set (`stats.json`) as an HTML page."""
    account = row_account(stats)
    unusable = [
        UnusablePictures(name, reason, PICTURE_REASONS.get(reason, ""), cost.pictures, cost.rows)
        for name in account.names
        for reason, cost in stats.pictures[name].unusable.items()
    ]
    files = [Tile(f"{name}.jsonl", f"{count:,}", "rows") for name, count in stats.examples.items()]
    page = CountsPage(
        f"{stats.dataset}: where every row went",
        stats.made_of,
        account_tiles(account) + files,
        account,
        sorted(unusable, key=lambda one: -one.rows),
    )
    return render("counts.html.jinja", page)
