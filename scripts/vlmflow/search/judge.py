"""Evaluates the best checkpoint of a trial on val: by itself, or against another trial (docs/evaluation.md).

Merged weights are made for this alone, and removed. The test split has no way in here.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import msgspec

from vlmflow.config.search_settings import Objective
from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import remove
from vlmflow.evaluation.answer_losses import Measured, Work
from vlmflow.evaluation.chosen_split import ChosenSplit, SplitFiles, choose_from_split, refuse_none
from vlmflow.evaluation.margins import margin_figures
from vlmflow.evaluation.measure import Measurement, ScoredModel, Scorer, evaluated_rows, scorer
from vlmflow.evaluation.report import MarginFigures
from vlmflow.fetch.placed import ModelManifest, read_model_manifest
from vlmflow.merging.merge import merge_weights
from vlmflow.rows.holdout import Part
from vlmflow.search.best import decisive
from vlmflow.search.study import TrialResult
from vlmflow.search.trial import Ended, one_start, starts_of
from vlmflow.supervisor.report import digests_of, release
from vlmflow.supervisor.train import Trained
from vlmflow.swift.arguments import Training
from vlmflow.swift.child_process import ChildFailedError

FOLDER = "judged"
"""The folder of a run folder that holds the merged weights as long as they are evaluated."""


JUDGING = 4
"""The way in which a trial's value is computed from its model and the split. Kept results belong to it: raise it
whenever a change of how rows, donors or figures are chosen may change a value."""


class NotJudgedError(VlmflowError):
    """The trial's model cannot be evaluated, as when a GPU's memory does not suffice; the base could."""


@dataclass(frozen=True)
class Judgement:
    """How trials are evaluated. run: its name, for messages. val: the split.

    rows, feedback: as in runs.NAME.evaluate. store: of measured losses; the base is measured once for all trials.
    threads: the number of cores to use. halved: whether a half of val judges.
    """

    run: str
    val: SplitFiles
    rows: int
    feedback: bool | None
    store: Path
    threads: int
    halved: bool

    def chosen(self, training: Training, part: Part) -> tuple[ChosenSplit, Measurement]:
        """Return the rows of one half of val that are evaluated, of all of it if it has none; and how.

        training: of any trial; no search changes what this depends on.
        """
        chosen = choose_from_split(
            self.val,
            feedback=self.feedback,
            count=self.rows,
            key=f"runs.{self.run}.evaluate.rows",
            seed=training.settings.seed,
            part=part if self.halved else None,
        )
        of_run = training.settings, training.model.model_type, training.device, training.processes
        return chosen, chosen.measurement(*of_run, self.threads)


def judged(ended: Ended, own: Training, model: Path, objective: Objective, how: Judgement) -> TrialResult:
    """Return a trial's result with the objective as its value, and the hours that it took to measure it added.

    It is measured on the half of val that chooses. A result that is not done is returned as it is.

    own: the trial's training. model: folder with the base model's manifest.

    Raises VlmflowError if rows or pictures have changed, or no row can be evaluated; a model that cannot be measured is
    a failed trial.
    """
    if ended.trained is None or ended.result.value is None:
        return ended.result
    base = read_model_manifest(model)
    with one_start(ended.step):
        try:
            chosen, measurement = how.chosen(own, "chooses")
            of_base = scorer(ScoredModel("the base", base.folder, base.digest), measurement, how.store)
            of_trial = _scorer("the trial's model", ended.trained, own, base, measurement, how)
            uses = decisive(objective, _figures(chosen, of_base, of_trial, how))
            result = msgspec.structs.replace(ended.result, value=uses.tuned.mean)
        except NotJudgedError as error:
            result = msgspec.structs.replace(ended.result, state="failed", reason=error.cause, value=None)
    hours = starts_of(ended.step).seconds / 3600
    return msgspec.structs.replace(result, hours=hours, gpu_hours=hours * own.ranks)


def compared(
    own: tuple[Trained, Training], best: tuple[Trained, Training], model: Path, how: Judgement
) -> tuple[MarginFigures, bool]:
    """Return the figures of two trials, as base and as tuned, on the half of val that judges; `against_own.Compare`.

    own, best: what trial 0 and the best one left, with their trainings. model: folder with the base model's manifest.

    Raises VlmflowError if rows or pictures have changed, no row can be evaluated, or a model cannot be measured.
    """
    base = read_model_manifest(model)
    chosen, measurement = how.chosen(own[1], "judges")
    of_own, of_best = (
        _scorer(name, trained, training, base, measurement, how)
        for name, (trained, training) in (("trial 0's model", own), ("the best trial's model", best))
    )
    return _figures(chosen, of_own, of_best, how), how.halved


def _figures(chosen: ChosenSplit, of_base: Scorer, of_tuned: Scorer, how: Judgement) -> MarginFigures:
    rows, too_long = evaluated_rows(chosen.rows, of_base, of_tuned)
    refuse_none(rows, how.val.rows, chosen.out + too_long)
    return margin_figures(rows)


def _scorer(
    name: str, trained: Trained, training: Training, base: ModelManifest, measurement: Measurement, how: Judgement
) -> Scorer:
    """Return what merges a trial's best checkpoint, measures it, and removes the merged weights."""

    def measure(rows: Sequence[Work]) -> Mapping[str, Measured]:
        folder = trained.folder.path / FOLDER
        remove(folder)
        full, merged = folder / "full", folder / "merged"
        full.mkdir(parents=True)
        try:
            release(trained.best.folder, full, training.tuner)
            merge_weights(base.folder, full, merged, base.files, how.threads)
            # What the merge was made of identifies its result, without a second look at all of its bytes.
            parts = json.dumps([base.digest, digests_of(full, training.tuner)], sort_keys=True)
            model = ScoredModel(name, merged, sha256(parts.encode()).hexdigest())
            return scorer(model, measurement, how.store)(rows)
        except ChildFailedError as error:
            raise NotJudgedError(error.cause, error.next_step) from None
        finally:
            remove(folder)

    return measure
