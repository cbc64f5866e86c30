"""Train with the settings that a search asks, up to the end of its step."""

from pathlib import Path

from msgspec import structs

from vlmflow.config.run_blocks import FlatRun
from vlmflow.config.search_settings import Objective
from vlmflow.config.settings import PartOf, Settings
from vlmflow.core.account import read_account, write_account
from vlmflow.core.errors import VlmflowError, log, printable
from vlmflow.core.files import sha256_of
from vlmflow.evaluation.chosen_split import SplitFiles
from vlmflow.evaluation.measure import MEASURING
from vlmflow.harness.stage import run_stage
from vlmflow.lengths.summary import fitted_rows
from vlmflow.search.judge import JUDGING, Judgement, judged
from vlmflow.search.study import read_asked
from vlmflow.search.trial import KeptResult, empty_slot, kept_file, of_trial, run_trial, went_on
from vlmflow.supervisor.plan import plan_training
from vlmflow.supervisor.report import Gate
from vlmflow.supervisor.smoke import refuse_failed, with_passes
from vlmflow.swift.arguments import Training


class JudgeBlock(Settings):
    """What a trial is judged by; see docs/config.md (search.NAME.objective, runs.NAME.evaluate)."""

    objective: Objective
    rows: int | None
    """How many rows are evaluated; null if the validation loss judges."""

    feedback: bool | None


def main(
    *,
    asked: Path,
    rows: Path,
    model: Path,
    smoke: Path,
    result: Path,
    settings: PartOf[FlatRun],
    objective: JudgeBlock,
    picture_store: Path,
    run_store: Path,
    evaluation_store: Path,
    pictures: list[Path] | None = None,
    stats: list[Path] | None = None,
    val: list[Path] | None = None,
    judged_pictures: list[Path] | None = None,
    raw_train: list[Path] | None = None,
    fixed_rows: list[Path] | None = None,
    threads: int = 1,
) -> None:
    """Run one trial.

    asked: what its step asks (search/NAME/ROUND/RUNG/asked.json). rows: the run's rows that fit (fitted/RUN).
    model: folder with the base model's manifest. smoke: the run's smoke stage, whose gate must be open.
    result: the file to write; its name is the slot.
    settings: those of the run. objective: what is compared. picture_store, run_store, evaluation_store: the folders
    with all picture stores, all run folders and all measured losses. pictures: the image manifest of the train split;
    none if rows have no pictures.
    stats, val, judged_pictures, raw_train, fixed_rows: what an evaluation needs; none if the validation loss judges.
    """
    account, slot = read_asked(asked), int(result.stem)
    if slot >= len(account.trials):
        raise VlmflowError(f"{asked}: it has no slot {slot}", f"remove {asked}, and run the same command again")
    trial = account.trials[slot]
    if trial is None:
        write_account(result, empty_slot(account.empty))
        return
    run = rows.name
    label = f"search {account.search}, trial {trial.number}"
    gate = read_account(smoke / "gate.json", Gate)
    refuse_failed(gate, run)

    def look() -> Training:
        training = plan_training(settings, rows, model, picture_store, pictures or [])
        return with_passes(training, gate, run)

    training, runs = look(), run_store / run / "search"
    own = of_trial(training, trial)
    # The account of the data set has the digests of all rows, raw ones with their gold answers included.
    of_rows = {"data": sha256_of(stats[0]), "measuring": MEASURING, "judging": JUDGING} if stats else {}
    kept = kept_file(own, runs, objective.model_dump() | of_rows)
    if kept.is_file():
        log.info(f"{label}: has trained to step {trial.steps} before; its result is kept ({kept})")
        write_account(result, read_account(kept, KeptResult).of(account.search, trial))
        return
    if objective.rows is not None and went_on(own, runs):
        folder = runs / own.digest()
        raise VlmflowError(
            f"{folder}: trained on beyond step {trial.steps}, whose model can no longer be judged by "
            f"{objective.objective}",
            f"remove {folder}, and run the same command again: this trial trains from step 0",
        )
    ended = run_trial(trial, own, runs, threads, account.search)
    if ended.trained:
        with ended.trained.folder.set_aside_where_refused(label):
            look()  # check again: trainers read pictures for hours
    final = ended.result
    if stats and val and objective.rows is not None:
        how = Judgement(
            run=run,
            val=SplitFiles(
                val[0], stats[0], picture_store, judged_pictures or [], {"train": raw_train or []}, fixed_rows or []
            ),
            rows=objective.rows,
            feedback=objective.feedback,
            store=evaluation_store,
            threads=threads,
            halved=fitted_rows(rows).halved,
        )
        final = judged(ended, own, model, objective.objective, how)
    if final.reason:
        final = structs.replace(final, reason=printable(final.reason.replace("runs.NAME", f"runs.{run}")))
    if final.state == "done":
        write_account(kept, KeptResult(account.search, final))
    write_account(result, final)
    text = f"{final.value:.4f} at step {final.steps}" if final.value is not None else f"{final.state}: {final.reason}"
    log.info(f"{label}: {text}")


if __name__ == "__main__":
    run_stage(main, globals().get("snakemake"))
