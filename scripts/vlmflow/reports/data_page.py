"""The data page: one HTML file with a data set's content, its lost rows, and the reasons."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vlmflow.config.settings import NearDuplicates, PictureLimits
from vlmflow.core.account import read_account
from vlmflow.pictures.manifest import PictureCounts
from vlmflow.reports.charts import Chart, Histogram, chart, integer_bins, wide_bins
from vlmflow.reports.data_facts import (
    FILES,
    REJECTS_PER_REASON,
    SAMPLES,
    RowFacts,
    first_rejects,
    longer_sides,
    row_facts,
)
from vlmflow.reports.look_alikes_section import LookAlikes, look_alikes
from vlmflow.reports.page import Tile, render
from vlmflow.reports.row_account import Counted, Loss, RowAccount, account_tiles, ranked, row_account
from vlmflow.reports.thumbnails import Shown, thumbnail
from vlmflow.rows.sharegpt import ShareGptRow, in_words
from vlmflow.rows.stats import QuarantinedRow, RawFile, Stats

SOURCES_SHOWN = 20
THUMBNAIL = 420
"""Pixels of a sample's longer side."""

TURNS_SHOWN = 6
CHARACTERS_SHOWN = 500
RAW_SHOWN = 1_500
"""Characters that are shown of a turn, and of a rejected row."""


@dataclass(frozen=True)
class Text:
    """The beginning of a text, and the number of characters that are not shown."""

    text: str
    more: int

    @classmethod
    def beginning(cls, text: str, shown: int) -> "Text":
        """Return the first `shown` characters of a text."""
        return cls(text[:shown], max(0, len(text) - shown))


@dataclass(frozen=True)
class Sample:
    """A row of a data file. turns: the first ones, behind the row's tools; more: the number of others."""

    file: str
    id: str
    source: str
    pictures: list[Shown]
    scores: list[float]
    turns: list[tuple[str, Text, str]]
    """Speaker, text, and a note on it, which may be empty."""

    more: int


@dataclass(frozen=True)
class Reject:
    """A rejected row. row: the quarantine's line without the raw row. raw: the raw row."""

    row: QuarantinedRow
    raw: Text


@dataclass(frozen=True)
class SplitPictures:
    """The pictures that a raw split names. Lists have names with numbers of pictures, the most frequent first.

    formats, rewritten, first_frames, other_names: of the usable ones. unusable: by reason. missing: by source.
    """

    name: str
    named: int
    usable: int
    formats: list[tuple[str, int]]
    rewritten: list[tuple[str, int]]
    first_frames: list[tuple[str, int]]
    other_names: list[tuple[str, int]]
    unusable: list[tuple[str, int]]
    missing: list[tuple[str, int]]


@dataclass(frozen=True)
class DataPage:
    """The page's facts.

    sources: those of the kept rows, the largest first; more_sources: the number of others. trained_text: what the
    scores of the trained answers mean; null if all are good, or have none. pictures: those of each raw split; none if
    they were not checked. near: null without test rows. rejects: the first ones of every reason.
    """

    title: str
    subtitle: str
    tiles: list[Tile]
    account: RowAccount
    sources: list[Counted]
    more_sources: int
    trained_text: str | None
    row_charts: list[Chart]
    pictures: list[SplitPictures]
    picture_charts: list[Chart]
    near: LookAlikes | None
    samples: list[Sample]
    rejects: list[tuple[Loss, list[Reject]]]
    rejects_per_reason: int
    quarantine: Path


def data_page(
    data: Path,
    manifests: Mapping[str, Path],
    store: Path,
    limits: PictureLimits,
    near_duplicates: NearDuplicates,
    good_run: str | None = None,
) -> str:
    """Return the page.

    data: the data set's folder with the files of `validate_sharegpt` and `find_near_duplicates`.
    manifests: the image manifest of each raw split. store: the data set's picture store. limits: those of its pictures.
    near_duplicates: how they were searched, and whether their train rows were rejected. good_run: a run that trains
    only good attempts of the same data.

    Raises VlmflowError if a file has a damaged line.
    """
    stats = read_account(data / "stats.json", Stats)
    facts = {name: row_facts(data / f"{name}.jsonl", SAMPLES.get(name, 0)) for name in FILES}
    facts = {name: found for name, found in facts.items() if found.turns.count}
    account = row_account(stats)
    near = look_alikes(data / "near_duplicates.jsonl", store, limits, near_duplicates, bool(manifests))
    rejected = first_rejects(data / "quarantine.jsonl")
    checked = store if manifests else None
    sources = ranked(stats.kept_by_source)
    page = DataPage(
        title=f"{stats.dataset}: the data",
        subtitle=_made_from(stats),
        tiles=_tiles(stats, account),
        account=account,
        sources=sources[:SOURCES_SHOWN],
        more_sources=len(sources[SOURCES_SHOWN:]),
        trained_text=in_words(stats.trained_characters, stats.scored, good_run),
        row_charts=_row_charts(facts),
        pictures=[_pictures(*one) for one in stats.pictures.items()] if stats.pictures_checked else [],
        picture_charts=_picture_charts({split: longer_sides(file) for split, file in manifests.items()}),
        near=near if stats.examples["test"] else None,
        samples=[_sample(name, row, checked, limits) for name, found in facts.items() for row in found.samples],
        rejects=[(loss, [_reject(row) for row in rejected.get(loss.name, [])]) for loss in account.rejected],
        rejects_per_reason=REJECTS_PER_REASON,
        quarantine=data / "quarantine.jsonl",
    )
    return render("data.html.jinja", page)


def _made_from(stats: Stats) -> str:
    if stats.members:
        return stats.made_of
    return f"{stats.made_of}, made from {' and '.join(map(_files, stats.raw.values()))}"


def _files(raw: list[RawFile]) -> str:
    """Return the names of the files of one raw split."""
    first = Path(raw[0].file).name
    return first if len(raw) == 1 else f"{first} ({len(raw)} files)"


def _tiles(stats: Stats, account: RowAccount) -> list[Tile]:
    notes = dict.fromkeys(FILES, "rows")
    if "test" not in stats.splits and not stats.settings.test_share:
        notes["test"] = "rows: no raw test split, and test_share is 0"
    files = [Tile(f"{name}.jsonl", f"{stats.examples[name]:,}", notes[name]) for name in FILES]
    named = sum(counts.named for counts in stats.pictures.values())
    usable = sum(counts.usable for counts in stats.pictures.values())
    return [
        *account_tiles(account),
        *files,
        *([Tile("usable pictures", f"{usable:,}", f"of {named:,} named")] if stats.pictures_checked else []),
    ]


def _reject(row: QuarantinedRow) -> Reject:
    return Reject(row, Text.beginning(bytes(row.raw).decode(errors="replace"), RAW_SHOWN))


def _row_charts(facts: dict[str, RowFacts]) -> list[Chart]:
    turns, scores, characters, answers = (
        {name: getattr(found, measure) for name, found in facts.items()}
        for measure in ("turns", "scores", "characters", "answers")
    )
    charts = [
        chart("Turns of a row", "turns, without that of system", turns, integer_bins(turns)),
        chart("Scores of the answers", "score, 0 to 10", scores, integer_bins(scores, range(11))),
        chart("Text of a row", "characters, all turns together", characters, wide_bins(characters)),
        chart("Text of an answer", "characters of a gpt turn", answers, wide_bins(answers)),
    ]
    return [drawn for drawn in charts if drawn.names]


def _picture_charts(sides: dict[str, Histogram]) -> list[Chart]:
    drawn = chart("Size of the usable pictures", "pixels, longer side", sides, wide_bins(sides))
    return [drawn] if drawn.names else []


def _pictures(split: str, counts: PictureCounts) -> SplitPictures:
    usable = (counts.formats, counts.rewritten, counts.first_frames, counts.other_names)
    costs = (counts.unusable, counts.missing_by_source)
    others = ({name: cost.pictures for name, cost in some.items()} for some in costs)
    ordered = (sorted(found.items(), key=lambda one: (-one[1], one[0])) for found in (*usable, *others))
    return SplitPictures(split, counts.named, counts.usable, *ordered)


def _sample(file: str, row: ShareGptRow, store: Path | None, limits: PictureLimits) -> Sample:
    """Return a row as the page shows it. store: None if pictures were skipped, since their names are unchecked."""
    return Sample(
        file,
        row.id,
        row.source,
        [Shown(thumbnail(store / name, THUMBNAIL, limits) if store else None, name) for name in row.images],
        row.scores,
        [
            *([("tools", Text.beginning(row.tools, CHARACTERS_SHOWN), "")] if row.tools else []),
            *(
                (
                    turn.speaker,
                    Text.beginning(turn.value, CHARACTERS_SHOWN),
                    "not trained" if turn.loss is False else "",
                )
                for turn in row.conversations[:TURNS_SHOWN]
            ),
        ],
        max(0, len(row.conversations) - TURNS_SHOWN),
    )
