"""The sources and licences of a model's training data: a licence is stated or unknown, never guessed.

The provenance of a published model: `merged/RUN/provenance.json`.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from vlmflow.config.source import HubSource, parse_source
from vlmflow.evaluation.report import EvaluationReport
from vlmflow.lengths.summary import ChatTemplate
from vlmflow.merging.proof import Checks, LimitedFile
from vlmflow.pictures.manifest import REWRITTEN_SUFFIX, spellings
from vlmflow.rows.mixture_files import member_of
from vlmflow.rows.sharegpt import ShareGptRow, lines_of
from vlmflow.rows.stats import Stats
from vlmflow.supervisor.report import Gate, TrainingReport

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
    sources = [_public(address) for address in addresses]
    return StatedLicences(dataset, sources, licence or UNKNOWN, _listed(questions), _listed(pictures))


def _stated(name: str, beginnings: list[tuple[str, str]]) -> str:
    """Return the licence of the longest matching beginning of a picture's path, in any of its spellings."""
    for spelling in spellings(name.removesuffix(REWRITTEN_SUFFIX)) if beginnings else ():
        for beginning, licence in beginnings:
            if spelling.startswith(beginning):
                return licence
    return UNKNOWN


def _public(address: str) -> str:
    """Return an address on the hub unchanged, and only the name of a local file."""
    source = parse_source(address)
    return str(source) if isinstance(source, HubSource) else source.name


def _listed(counts: Counter[tuple[str, str]]) -> list[LicenceOfSource]:
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return [LicenceOfSource(name, count, licence) for (name, licence), count in ranked]


def hub_datasets(*stated: StatedLicences) -> list[str]:
    """Return the hub's names of the data sets, for a model card's metadata."""
    sources = (parse_source(source) for one in stated for source in one.sources)
    return sorted({source.repo for source in sources if isinstance(source, HubSource)})


class Fp8Files(msgspec.Struct, frozen=True):
    """A model in FP8. digest: of its files, as pins.yaml has it. files: their SHA-256 by name."""

    digest: str
    files: dict[str, str]


class BaseModelFiles(msgspec.Struct, frozen=True):
    """The base model, from its manifest. files: their SHA-256 by name.

    provenance: that of the run whose weights it is (`source: merged/RUN`); null for any other base.
    dequantized_from: what is at `source`, if the base was made of it in bfloat16; left out for any other base.
    """

    source: str
    revision: str | None
    digest: str
    files: dict[str, str]
    left_out: list[str]
    provenance: "Provenance | None" = None
    dequantized_from: Fp8Files | msgspec.UnsetType = msgspec.UNSET


class Provenance(msgspec.Struct, frozen=True):
    """The origin of merged weights: the accounts of the stages, each with its own settings.

    data, smoke, verification: the complete accounts of these stages. training: the report of the full run, without the
    losses of every step. sees_pictures: whether the merged model has a processor for pictures. merged: the SHA-256 of
    the published files by name, without those about the model. picture_limits: the one file of them that differs from
    the base's and from verified/RUN on purpose; null if the model sees no pictures. git_commit: that of the code; null
    without a checkout.
    versions: of Python and of packages, by name. evaluations: by split; {} if the run was not evaluated.
    chosen_by: the search, trial and study that chose the settings (`runs.NAME.chosen_by`); null if none did.
    chat_template: how the model's chat template renders rows, compared with the training; null in an account of before.
    trained_text: what the scores of the trained answers mean, for people; null without scores.
    """

    run: str
    data: Stats
    rights: StatedLicences
    base_model: BaseModelFiles
    smoke: Gate
    training: TrainingReport
    verification: Checks
    sees_pictures: bool
    merged: dict[str, str]
    git_commit: str | None
    versions: dict[str, str]
    evaluations: dict[str, EvaluationReport] = {}
    picture_limits: LimitedFile | None = None
    chosen_by: str | None = None
    trained_text: str | None = None
    chat_template: ChatTemplate | None = None

    @property
    def rounds(self) -> list["Provenance"]:
        """The run itself, the run whose weights are its base, and so on: the newest first."""
        before = self.base_model.provenance
        return [self, *(before.rounds if before else [])]
