"""Sends a finished run to trackers: also one of the past, and one whose configuration names none.

It reads what the run recorded, with all evaluations and answers of its weights that are there. A second call sends
nothing twice.
"""

import logging
from functools import partial
from pathlib import Path

from pydantic import ValidationError

from vlmflow.config.after_training import TrackSettings
from vlmflow.config.data_settings import RAW_SPLITS
from vlmflow.config.model import settings_of
from vlmflow.core.account import read_account
from vlmflow.core.errors import VlmflowError, log
from vlmflow.evaluation.report import EvaluationReport
from vlmflow.evaluation.verdict import REPORT
from vlmflow.serving.finished_run import FinishedRun, finished_run
from vlmflow.track.send import all_traces, send
from vlmflow.track.story import of_weights, story_of


def main(name: str, files: list[Path], folder: Path, given: dict[str, str]) -> None:
    """Send the run.

    name: the run. files: as for snakemake's --configfile. folder: the working directory. given: trackers, as in
    runs.NAME.track; without any, those of the configuration. A file of the configuration is relative to the working
    directory, as in the rule; a given one to the current folder.

    Raises VlmflowError if the run has no weights, no tracker is named, or one of them failed.
    """
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    run = finished_run(folder, name)
    config = settings_of(files)
    if given:
        settings = _trackers(given)
    elif name in config.runs and (configured := config.runs[name].track):
        settings = configured.within(folder)
    else:
        raise VlmflowError(
            f"run {name}: no tracker is named",
            f"name one: --mlflow sqlite:///mlflow.db, or set runs.{name}.track, and name its file by --configfile",
        )
    evaluated = _made(folder, "eval", run)
    answered = _made(folder, "answers", run)
    if settings.otlp and not evaluated:
        raise VlmflowError(
            f"{folder / 'eval' / name}: the run's weights were not evaluated, and traces are of evaluated rows",
            f"evaluate it: vlmflow run … eval/{name}/val; or leave otlp out",
        )
    story = story_of(folder / "checkpoints" / name / "full", run.merged, evaluated, answered)
    datasets = {each.name: read_account(each / REPORT, EvaluationReport).dataset for each in evaluated}
    rows = {split: folder / "data" / dataset / f"{split}.jsonl" for split, dataset in datasets.items()}
    places = (
        folder / "images" / dataset / f"{split}.jsonl" for dataset in {*datasets.values()} for split in RAW_SPLITS
    )
    manifests = [path for path in places if path.is_file()]
    traces = partial(all_traces, evaluated, answered, rows, manifests, story.ended)
    send(story, traces, settings, folder / config.stores.trackers)


def _made(folder: Path, stage: str, run: FinishedRun) -> list[Path]:
    """Return a stage's folders of splits that are of the run's weights; the log names those of other weights.

    Raises VlmflowError if a report is damaged.
    """
    splits = []
    for split in sorted(report.parent for report in (folder / stage / run.name).glob(f"*/{REPORT}")):
        if of_weights(split, run.merged):
            splits.append(split)
        else:
            log.warning(
                f"{split}: it is of other weights than those in {run.merged}, so its figures are left out\n  "
                f"what to do: remove it, make it again (vlmflow run … {stage}/{run.name}/{split.name}), and "
                "run the same command again"
            )
    return splits


def _trackers(given: dict[str, str]) -> TrackSettings:
    try:
        return TrackSettings.model_validate(given)
    except ValidationError as error:
        faults = "; ".join(
            f"{'.'.join(map(str, fault['loc'])) or 'trackers'}: {fault['msg']}" for fault in error.errors()
        )
        raise VlmflowError(faults, "see --help") from None
