"""The provenance of a published model, `merged/RUN/provenance.json`: its type, what is collected in it, and from where.

It has the sources and licences of the training data, too: a licence is stated or unknown, never guessed.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from vlmflow.config.source import HubSource, parse_source
from vlmflow.core.account import read_account
from vlmflow.evaluation.report import EvaluationReport
from vlmflow.fetch.placed import PROVENANCE, ModelManifest, digest_of_files
from vlmflow.lengths.summary import ChatTemplate
from vlmflow.merging.proof import PROOF, WRITTEN_AFTERWARDS, Checks, LimitedFile, Proof, proven_digest
from vlmflow.pictures.manifest import REWRITTEN_SUFFIX, spellings
from vlmflow.rows.mixture_files import member_of
from vlmflow.rows.sharegpt import ShareGptRow, in_words, lines_of
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

    @property
    def proven_weights(self) -> str:
        """The digest that the weights had when they were proven (`merging.proof.proven_digest`)."""
        # The proven folder has the base's own files of these names, which the published folder replaces.
        of_base = {name: digest for name, digest in self.base_model.files.items() if name in WRITTEN_AFTERWARDS}
        limited = self.picture_limits
        return digest_of_files(self.merged | of_base | ({limited.file: limited.proven} if limited else {}))


def provenance(
    run: str,
    data: Stats,
    manifest: ModelManifest,
    gate: Gate,
    trained: TrainingReport,
    proof: Proof,
    rights: StatedLicences,
    *,
    sees_pictures: bool,
    limited: LimitedFile | None,
    evaluations: dict[str, EvaluationReport],
    chosen_by: str | None,
    chat_template: ChatTemplate | None,
    good_run: str | None = None,
    of_base: Provenance | None = None,
) -> Provenance:
    """Collect the provenance from the stages' accounts.

    data: the data set's account. manifest: that of the base model. of_base: the provenance of a base that is the
    weights of another run. gate: of the smoke run. trained: the report of the full run. proof: that of verified/RUN.
    limited: the published file that differs from the proven one. evaluations: by split. good_run: a run that trains
    only good attempts of the same data. The others are as in `Provenance`.
    """
    in_fp8 = manifest.dequantized_from
    return Provenance(
        run=run,
        data=data,
        rights=rights,
        base_model=BaseModelFiles(
            source=manifest.source,
            revision=manifest.revision,
            digest=manifest.digest,
            files={name: record.sha256 for name, record in manifest.files.items()},
            left_out=manifest.left_out,
            provenance=of_base,
            dequantized_from=msgspec.UNSET
            if in_fp8 is msgspec.UNSET
            else Fp8Files(in_fp8.digest, {name: record.sha256 for name, record in in_fp8.files.items()}),
        ),
        smoke=gate,
        training=msgspec.structs.replace(trained, losses=msgspec.UNSET),
        verification=proof.checks,
        sees_pictures=sees_pictures,
        merged={
            name: file.sha256
            for name, file in proof.files.items()
            if name not in WRITTEN_AFTERWARDS  # a base may have such files, which ours replace
        }
        | ({limited.file: limited.published} if limited else {}),
        picture_limits=limited,
        git_commit=proof.git_commit,
        versions=proof.versions,
        evaluations=evaluations,
        chosen_by=chosen_by,
        trained_text=in_words(data.trained_characters, data.scored, good_run),
        chat_template=chat_template,
    )


def proven_weights(verified: Path, merged: Path) -> str | None:
    """Return the digest of a run's proven weights (`merging.proof.proven_digest`); None if the run has none.

    What was evaluated or asked must be these weights, and not those of an earlier training.
    verified, merged: verified/RUN and merged/RUN; the second tells it if the first was removed.

    Raises VlmflowError if the file that tells it is damaged.
    """
    if (verified / PROOF).is_file():
        return proven_digest(read_account(verified / PROOF, Proof))
    return published_weights(merged) if (merged / PROVENANCE).is_file() else None


def published_weights(merged: Path) -> str:
    """Return the digest that the weights in merged/RUN had when they were proven (`merging.proof.proven_digest`).

    Raises VlmflowError if its provenance is missing or damaged.
    """
    return read_account(merged / PROVENANCE, Provenance).proven_weights
