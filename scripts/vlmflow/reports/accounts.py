"""The provenance of a published model: `merged/RUN/provenance.json`."""

import msgspec

from vlmflow.evaluation.accounts import EvaluationReport
from vlmflow.lengths.accounts import ChatTemplate
from vlmflow.merging.proof import Checks
from vlmflow.merging.published_limits import LimitedFile
from vlmflow.reports.licences import StatedLicences
from vlmflow.rows.stats import Stats
from vlmflow.supervisor.accounts import Gate, TrainingReport


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
