"""Compare a run's proven weights with their base on rows that neither it nor a run below it was trained on."""

from pathlib import Path

from vlmflow.config.after_training import ChosenBy
from vlmflow.config.run_blocks import FlatRun
from vlmflow.config.settings import PartOf
from vlmflow.core.account import write_account
from vlmflow.core.errors import log
from vlmflow.core.files import whole_folder
from vlmflow.evaluation.chosen_split import SplitFiles, counts_of, draw_split, read_candidates, refuse_none
from vlmflow.evaluation.margins import margin_report
from vlmflow.evaluation.measure import ScoredModel, evaluated_rows, scorer, versions, write_lines
from vlmflow.evaluation.report import EvaluatedModel, EvaluationReport, record_look
from vlmflow.evaluation.verdict import REPORT, also_chose, judge, with_how_val_was_used
from vlmflow.fetch.placed import read_model_manifest
from vlmflow.harness.stage import run_stage
from vlmflow.lengths.summary import fitted_rows
from vlmflow.merging.proof import proven_digest, read_proof
from vlmflow.swift.template_texts import named


def main(
    *,
    verified: Path,
    full: Path,
    fitted: Path,
    model: Path,
    chosen: Path,
    rows: Path,
    stats: Path,
    evaluated: Path,
    settings: PartOf[FlatRun],
    picture_store: Path,
    evaluation_store: Path,
    chosen_by: ChosenBy | None = None,
    pictures: list[Path] | None = None,
    processes: int = 1,
    threads: int = 1,
) -> None:
    """Evaluate one run on one split.

    verified: the proven folder (verified/RUN). full: the training's folder (checkpoints/RUN/full). fitted: its rows
    (fitted/RUN). model: folder with the base model's manifest.
    chosen: the rows that can be evaluated (chosen/RUN/SPLIT).
    rows: the split of the data set (data/DATASET/val.jsonl or test.jsonl). stats: the data set's account.
    evaluated: the folder to make (eval/RUN/SPLIT): rows.jsonl, left_out.jsonl and report.json.
    settings: those of the run. picture_store: the folder with all picture stores.
    evaluation_store: the folder that keeps measured losses, and the log of looks at test splits.
    chosen_by: the search that chose the run's settings by val; none on test.
    pictures: the image manifests of the data set; none if rows have no pictures.
    processes: how many measure side by side, each with a share of the cores or GPUs; losses do not depend on it.
    """
    run, split = evaluated.parent.name, evaluated.name
    proof, base = read_proof(verified), read_model_manifest(model)
    settings = named(settings, base.folder)
    # Only rows that the training was not given have chosen nothing: it may be of a time before val was halved.
    halved = fitted_rows(fitted).halved
    files = SplitFiles(rows, stats, picture_store, pictures or [])
    drawn = draw_split(
        *(files, read_candidates(chosen, files)),
        count=settings.rows,
        key=f"runs.{run}.evaluate.rows",
        seed=settings.seed,
        part="judges" if split == "val" and halved else None,
        neutral=settings.neutral_feedback,
    )
    how = drawn.measurement(settings, settings.model_type, settings.device, processes, threads)
    tuned_digest = proven_digest(proof)
    of_base = scorer(ScoredModel("the base", base.folder, base.digest), how, evaluation_store)
    of_tuned = scorer(ScoredModel("the tuned model", verified, tuned_digest), how, evaluation_store)
    scored, too_long = evaluated_rows(drawn.rows, of_base, of_tuned)
    out = drawn.out + too_long
    refuse_none(scored, rows, out)
    figures = margin_report(scored)
    verdict = judge(figures)
    chose = also_chose(full, chosen_by) if split == "val" and not halved else None
    looks = None
    if split == "test":
        looks = record_look(evaluation_store, "evaluate", run, drawn.dataset, drawn.rows_digest, tuned_digest)
    left_out = counts_of(out)
    report = EvaluationReport(
        run=run,
        dataset=drawn.dataset,
        split=split,
        verdict=verdict.name,
        costs_first_answers=verdict.costs_first_answers,
        sentence=with_how_val_was_used(verdict, chose, left_out),
        rows=figures.all.rows,
        groups=figures.all.groups,
        left_out=left_out,
        feedback=drawn.feedback,
        figures=figures,
        looks=looks,
        rows_digest=drawn.rows_digest,
        base=EvaluatedModel(base.digest),
        tuned=EvaluatedModel(tuned_digest),
        seed=settings.seed,
        dtype=settings.dtype,
        device=settings.device,
        image_max_tokens=settings.image_max_tokens,
        max_length=settings.max_length,
        versions=versions(),
        also_chose=chose,
        conditions=verdict.conditions,
    )
    with whole_folder(evaluated) as folder:
        write_lines(folder / "rows.jsonl", scored)
        write_lines(folder / "left_out.jsonl", out)
        write_account(folder / REPORT, report)
    rows_said = f"{report.rows:,} rows; {sum(report.left_out.values()):,} left out"
    log.info(f"{run}, {split}: {report.sentence} ({rows_said}: left_out.jsonl)")


if __name__ == "__main__":
    run_stage(main, globals().get("snakemake"))
