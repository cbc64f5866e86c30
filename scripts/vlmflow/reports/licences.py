"""The sources and licences of a model's training data: a licence is stated or unknown, never guessed."""

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from vlmflow.config.source import HubSource, parse_source
from vlmflow.pictures.manifest import REWRITTEN_SUFFIX, spellings
from vlmflow.rows.mixture_files import member_of
from vlmflow.rows.sharegpt import ShareGptRow, lines_of

UNKNOWN = "unknown"


class LicenceOfSource(msgspec.Struct):
    """The training rows of a source, and its licence; one source may have several licences."""

    source: str
    rows: int
    licence: str


class StatedLicences(msgspec.Struct):
    """The stated facts about a run's training data, in `provenance.json`; UNKNOWN if nothing is stated."""

    dataset: str

    sources: list[str]
    """The data set's addresses on the hub; local files only by name."""

    licence: str
    """The licence of the data set."""

    questions: list[LicenceOfSource]
    """By the rows' source, the one with the most rows first."""

    pictures: list[LicenceOfSource]
    """By the first folder of the pictures' paths, in a mixture after the name of the data set, in the same order."""


def stated_licences(
    dataset: str,
    addresses: Iterable[str],
    licence: str | None,
    source_licences: Mapping[str, str],
    picture_licences: Mapping[str, str],
    rows: Path,
) -> StatedLicences:
    """Collect the stated facts about a run's training data.

    addresses: the data set's sources in the configuration. licence, source_licences: see docs/config.md.
    picture_licences: those of picture_sources, by the beginnings of the pictures' paths; source_licences take
    precedence. rows: the training rows.

    Raises VlmflowError if a line is not a row.
    """
    beginnings = sorted(picture_licences.items(), key=lambda item: -len(item[0]))

    def of_picture(name: str, member: str) -> tuple[str, str]:
        own = name.removeprefix(f"{member}/") if member else name
        folder = own.partition("/")[0] if "/" in own else "."
        folder = f"{member}/{folder}" if member else folder
        return folder, source_licences.get(folder) or _stated(name, beginnings)

    questions: Counter[tuple[str, str]] = Counter()
    pictures: Counter[tuple[str, str]] = Counter()
    for row in lines_of(rows, ShareGptRow):
        questions[row.source, source_licences.get(row.source) or UNKNOWN] += 1
        pictures.update({of_picture(name, member_of(row.id)) for name in row.images})
    parsed = map(parse_source, addresses)
    sources = [str(source) if isinstance(source, HubSource) else source.name for source in parsed]
    return StatedLicences(dataset, sources, licence or UNKNOWN, _listed(questions), _listed(pictures))


def _stated(name: str, beginnings: list[tuple[str, str]]) -> str:
    """Return the licence of the longest matching beginning of a picture's path, in any of its spellings."""
    for spelling in spellings(name.removesuffix(REWRITTEN_SUFFIX)) if beginnings else ():
        for beginning, licence in beginnings:
            if spelling.startswith(beginning):
                return licence
    return UNKNOWN


def _listed(counts: Counter[tuple[str, str]]) -> list[LicenceOfSource]:
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return [LicenceOfSource(name, count, licence) for (name, licence), count in ranked]


def hub_datasets(*rights: StatedLicences) -> list[str]:
    """Return the hub's names of the data sets, for a model card's metadata."""
    sources = (parse_source(source) for licences in rights for source in licences.sources)
    return sorted({source.repo for source in sources if isinstance(source, HubSource)})
