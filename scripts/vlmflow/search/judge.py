"""Judges a trial by the evaluation on val: what its best checkpoint, merged, learned (docs/evaluation.md).

The test split has no way in here.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import msgspec

from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import remove
from vlmflow.evaluation.answer_losses import Measured, Work
from vlmflow.evaluation.chosen_split import RawRows, choose_from_split, refuse_none
from vlmflow.evaluation.evaluate import evaluated_rows
from vlmflow.evaluation.margins import margin_figures
from vlmflow.evaluation.measure import Measurement, ModelScorer, ScoredModel
from vlmflow.fetch.model_folder import read_model_manifest
from vlmflow.merging.merge import merge_weights
from vlmflow.search.accounts import TrialResult
from vlmflow.search.run_trial import Ended
from vlmflow.search.starts import one_start, starts_of
from vlmflow.swift.arguments import Training
from vlmflow.swift.child_process import ChildFailedError
from vlmflow.training.released import digests_of, release

FOLDER = "judged"
"""The folder of a run folder that holds the merged weights as long as they are evaluated."""


JUDGING = 2
"""The way in which a trial's value is computed from its model and the split. Kept results belong to it: raise it
whenever a change of how rows, donors or figures are chosen may change a value."""


class NotJudgedError(VlmflowError):
    """The trial's model cannot be evaluated, as when a GPU's memory does not suffice; the base could."""


@dataclass(frozen=True)
class Judgement:
    """How trials are judged. objective: "learned" or "uses_feedback". val, stats, pictures, raw: the val split.

    rows, feedback: as in runs.NAME.evaluate. run: its name, for messages. store: of measured losses; the base is
    measured once for all trials.
    """

    objective: str
    run: str
    val: Path
    stats: Path
    pictures: list[Path]
    raw: RawRows
    picture_store: Path
    rows: int
    feedback: bool | None
    store: Path


def judged(ended: Ended, own: Training, model: Path, how: Judgement, threads: int) -> TrialResult:
    """Return a trial's result with the objective as its value, and the hours that it took to measure it added.

    A result that is not done is returned as it is.

    own: the trial's training. model: folder with the base model's manifest. threads: the number of cores to use.

    Raises VlmflowError if rows or pictures have changed, or no row can be evaluated; a model that cannot be measured is
    a failed trial.
    """
    if ended.trained is None or ended.result.value is None:
        return ended.result
    base = read_model_manifest(model)
    place = ended.step.folder.path / FOLDER
    remove(place)
    with one_start(ended.step):
        try:
            full, merged = place / "full", place / "merged"
            full.mkdir(parents=True)
            release(ended.trained.best.folder, full, own.tuner)
            merge_weights(base.folder, full, merged, base.files, threads, own.tuner)
            # What the merge was made of identifies its result, without a second look at all of its bytes.
            parts = json.dumps([base.digest, digests_of(full, own.tuner)], sort_keys=True)
            tuned = ScoredModel("the trial's model", merged, sha256(parts.encode()).hexdigest())
            value = _value(ScoredModel("the base", base.folder, base.digest), tuned, own, how, threads)
            found = msgspec.structs.replace(ended.result, value=value)
        except NotJudgedError as error:
            found = msgspec.structs.replace(ended.result, state="failed", reason=error.cause, value=None)
        finally:
            remove(place)
    hours = starts_of(ended.step).seconds / 3600
    return msgspec.structs.replace(found, hours=hours, gpu_hours=hours * own.ranks)


def _value(base: ScoredModel, tuned: ScoredModel, training: Training, how: Judgement, threads: int) -> float:
    settings = training.settings
    chosen = choose_from_split(
        *(how.val, how.stats, how.picture_store, how.pictures, how.raw),
        feedback=how.feedback,
        count=how.rows,
        key=f"runs.{how.run}.evaluate.rows",
        seed=settings.seed,
    )
    measurement = Measurement(
        model_type=training.model.model_type,
        text_args=settings.text_args,
        loss_scale=chosen.loss_scale,
        pictures=chosen.pictures,
        image_max_tokens=settings.image_max_tokens,
        max_length=settings.max_length,
        device=training.device,
        dtype=settings.dtype,
        processes=training.processes,
        threads=threads,
    )
    of_base, of_tuned = (ModelScorer(one, measurement, how.store) for one in (base, tuned))

    def of_trial(rows: Sequence[Work]) -> Mapping[str, Measured]:
        try:
            return of_tuned(rows)
        except ChildFailedError as error:
            raise NotJudgedError(error.cause, error.next_step) from None

    found, too_long = evaluated_rows(chosen.rows, of_base, of_trial)
    refuse_none(found, how.val, chosen.out + too_long)
    uses = margin_figures(found).uses_feedback
    if uses is None:
        raise VlmflowError(
            f"{how.val}: its rows have no feedback, which {how.objective} compares", "set objective: eval_loss"
        )
    return -(uses.difference if how.objective == "learned" else uses.tuned).mean
