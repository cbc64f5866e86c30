"""The provenance of a published model, `merged/RUN/provenance.json`: its type, and what is collected in it.

Of a folder from elsewhere only a part is read, by a type of its own.
"""

from pathlib import Path
from typing import Self

import msgspec

from vlmflow.core.account import OtherVersionError, read_account
from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import lies_within
from vlmflow.evaluation.report import EvaluationReport
from vlmflow.fetch.placed import PROVENANCE, ModelManifest, digest_of_files
from vlmflow.lengths.summary import ChatTemplate
from vlmflow.merging.proof import PROOF, WRITTEN_AFTERWARDS, Checks, LimitedFile, Proof, proven_digest
from vlmflow.reports.licences import StatedLicences
from vlmflow.rows.stats import Stats
from vlmflow.supervisor.report import Gate, TrainingReport


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

    @classmethod
    def of(cls, manifest: ModelManifest, provenance: "Provenance | None") -> Self:
        """Return what a base model's manifest says. provenance: that of the run whose weights it is."""
        in_fp8 = manifest.dequantized_from or None
        return cls(
            source=manifest.source,
            revision=manifest.revision,
            digest=manifest.digest,
            files={name: record.sha256 for name, record in manifest.files.items()},
            left_out=manifest.left_out,
            provenance=provenance,
            dequantized_from=Fp8Files(in_fp8.digest, {name: record.sha256 for name, record in in_fp8.files.items()})
            if in_fp8
            else msgspec.UNSET,
        )


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
    stop_tokens: the tokens at which the merged model stops, one of which ends a trained answer; [] in one of before.
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
    stop_tokens: list[str] = []

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


def published_files(proof: Proof, limited: LimitedFile | None) -> dict[str, str]:
    """Return the SHA-256 of the files that are published, without those about the model, by name.

    proof: that of verified/RUN. limited: the published file that differs from the proven one.
    """
    # A base may have files about itself, which ours replace.
    files = {name: file.sha256 for name, file in proof.files.items() if name not in WRITTEN_AFTERWARDS}
    return files | ({limited.file: limited.published} if limited else {})


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


class RecordedFile(msgspec.Struct, frozen=True):
    """A file that a stage read, with its SHA-256."""

    file: str
    sha256: str


class _Member(msgspec.Struct, frozen=True):
    digests: dict[str, str]


class _Data(msgspec.Struct, frozen=True):
    dataset: str
    raw: dict[str, list[RecordedFile]]
    digests: dict[str, str]
    mended: list[RecordedFile] = []
    members: dict[str, _Member] = {}

    @property
    def raw_files(self) -> dict[str, str]:
        """The SHA-256 of the raw files by their names below the working directory.

        The stage recorded the paths that it read: in a pod they begin with its own folder on the volume.
        """
        digests = {}
        for file in (file for files in self.raw.values() for file in files):
            dataset = max(self.members or [self.dataset], key=lambda name: file.file.rfind(f"raw/{name}/"))
            beginning = f"raw/{dataset}/"
            digests[beginning + file.file.rpartition(beginning)[2]] = file.sha256
        return digests


class RecordedBase(msgspec.Struct, frozen=True):
    """The used part of `BaseModelFiles`."""

    digest: str
    files: dict[str, str]
    provenance: "Record | None" = None
    dequantized_from: Fp8Files | None = None


class _TrainingDigests(msgspec.Struct, frozen=True):
    data: str
    model: str
    released: dict[str, str]


class _Settings(msgspec.Struct, frozen=True):
    image_max_tokens: int


class _Training(msgspec.Struct, frozen=True):
    tuner: str
    settings: _Settings
    digests: _TrainingDigests


class Record(msgspec.Struct, frozen=True):
    """The part of a provenance that `chain` checks, also of other versions. Anybody may have written it."""

    run: str
    data: _Data
    base_model: RecordedBase
    training: _Training
    merged: dict[str, str]
    picture_limits: LimitedFile | None = None

    @property
    def rounds(self) -> "list[Record]":
        """The record, that of the run whose weights are its base, and so on."""
        before = self.base_model.provenance
        return [self, *(before.rounds if before else [])]

    @property
    def files(self) -> list[str]:
        """All names of files in it."""
        base, data = self.base_model, self.data
        names = [*base.files, *self.merged, *self.training.digests.released, *data.digests, *data.raw_files]
        names += [name for member in data.members.values() for name in member.digests]
        names += base.dequantized_from.files if base.dequantized_from else []
        return [*names, *([self.picture_limits.file] if self.picture_limits else [])]


def read_record(folder: Path) -> Record:
    """Read a published folder's provenance.

    Raises VlmflowError if it is missing, has another form, or names a file outside the folders.
    """
    file = folder / PROVENANCE
    try:
        record = read_account(file, Record)
    except OtherVersionError as error:
        raise VlmflowError(error.cause, "take a folder that vlmflow published, with its provenance.json") from None
    except VlmflowError as error:
        raise VlmflowError(error.cause, "name a published folder: merged/RUN, or a copy of it") from None
    for round in record.rounds:
        folders = (round.run, round.data.dataset, *round.data.members)
        unsafe = [name for name in folders if not lies_within(name) or "/" in name]
        if unsafe := unsafe + [name for name in round.files if not lies_within(name)]:
            raise VlmflowError(
                f"{file}: {unsafe[0]!r} is no name inside a folder", "do not use this folder: vlmflow writes none"
            )
    return record
