"""Compare the best trial of a search with the run's own settings, on rows of val that chose neither."""

from pathlib import Path

from vlmflow.config.after_training import EvaluateSettings
from vlmflow.config.run_blocks import FlatRun
from vlmflow.config.search_settings import SearchLimits
from vlmflow.config.settings import PartOf
from vlmflow.core.account import read_account, write_account
from vlmflow.core.errors import VlmflowError, log
from vlmflow.core.files import sha256_of
from vlmflow.evaluation.chosen_split import SplitFiles
from vlmflow.evaluation.report import MarginFigures
from vlmflow.harness.stage import run_stage
from vlmflow.lengths.summary import fitted_rows
from vlmflow.search.best import against_own
from vlmflow.search.judge import Judgement, compared
from vlmflow.search.study import AskedTrial, Study, StudyTrial
from vlmflow.search.trial import of_trial
from vlmflow.supervisor.plan import plan_training
from vlmflow.supervisor.train import Trained, trained_before
from vlmflow.swift.arguments import Training


def main(
    *,
    study: Path,
    rows: Path,
    model: Path,
    stats: Path,
    val: Path,
    judged: Path,
    settings: PartOf[FlatRun],
    evaluation: PartOf[EvaluateSettings],
    limits: SearchLimits,
    picture_store: Path,
    run_store: Path,
    evaluation_store: Path,
    pictures: list[Path] | None = None,
    judged_pictures: list[Path] | None = None,
    raw_train: list[Path] | None = None,
    fixed_rows: list[Path] | None = None,
    threads: int = 1,
) -> None:
    """Judge the best trial.

    study: the search's account after its last step. rows: the run's rows that fit (fitted/RUN). model: folder with the
    base model's manifest.
    stats, val, judged_pictures, raw_train, fixed_rows: what an evaluation on val needs.
    judged: the file to write (search/NAME/judged.json).
    settings, evaluation: those of the run. limits: those of the search. picture_store, run_store, evaluation_store: the
    folders with all picture stores, all run folders and all measured losses. pictures: the image manifest of the train
    split; none if rows have no pictures.
    """
    account, run = read_account(study, Study), rows.name
    how = Judgement(
        run=run,
        val=SplitFiles(val, stats, picture_store, judged_pictures or [], {"train": raw_train or []}, fixed_rows or []),
        rows=evaluation.rows,
        feedback=False if account.objective == "eval_loss" else evaluation.feedback,
        store=evaluation_store,
        threads=threads,
        halved=fitted_rows(rows).halved,
    )

    def compare(own: StudyTrial, best: StudyTrial) -> tuple[MarginFigures, bool]:
        training = plan_training(settings, rows, model, picture_store, pictures or [])
        runs = run_store / run / "search"
        first, second = (_left(training, account.search, trial, runs) for trial in (own, best))
        return compared(first, second, model, how)

    outcome = against_own(account, sha256_of(study), limits, compare)
    write_account(judged, outcome)
    log.info(f"search {account.search}: {outcome.sentence}")


def _left(training: Training, search: str, trial: StudyTrial, runs: Path) -> tuple[Trained, Training]:
    """Return what a trial that trained to its end left in its run folder, and its training."""
    wanted = AskedTrial(number=trial.number, settings=trial.settings, steps=trial.steps, hours=None)
    own = of_trial(training, wanted)
    trained = trained_before(own, runs)
    if trained is None:
        raise VlmflowError(
            f"{runs / own.digest()}: what trial {trial.number} trained is no longer there",
            f"remove {runs / own.digest()} and the trial's result in search/{search}/{trial.round}/{trial.rung}, and "
            "run the same command again: it trains again",
        )
    return trained, own


if __name__ == "__main__":
    run_stage(main, globals().get("snakemake"))
