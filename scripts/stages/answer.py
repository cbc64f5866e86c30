"""Ask a run's proven weights and their base the questions of a split, and score the answers."""

from pathlib import Path
from typing import Any

from vlmflow.config.run_blocks import FlatRun
from vlmflow.config.settings import PartOf
from vlmflow.core.account import write_account
from vlmflow.core.child_programs import ANSWER_KEY, key_of
from vlmflow.core.errors import log
from vlmflow.core.files import whole_folder
from vlmflow.evaluation.answers import Asking, ask_both, figures, fitting_cases, sentence_of
from vlmflow.evaluation.asking import Model, ModelAtUrl, OwnModel, versions
from vlmflow.evaluation.chosen_split import SplitFiles, counts_of, draw_split, read_candidates, refuse_none
from vlmflow.evaluation.measure import write_lines
from vlmflow.evaluation.report import AnswerReport, record_look
from vlmflow.fetch.placed import read_model_manifest
from vlmflow.harness.stage import run_stage
from vlmflow.lengths.summary import fitted_rows
from vlmflow.merging.proof import proven_digest, read_proof
from vlmflow.pictures.budget import PictureBudget

UNKNOWN = "unknown"


def main(
    *,
    verified: Path,
    fitted: Path,
    model: Path,
    chosen: Path,
    rows: Path,
    stats: Path,
    answered: Path,
    settings: PartOf[FlatRun],
    picture_store: Path,
    evaluation_store: Path,
    pictures: list[Path] = [],  # noqa: B006
    threads: int = 1,
) -> None:
    """Ask about one split.

    verified: the proven folder (verified/RUN). fitted: the training's rows (fitted/RUN). model: folder with the base
    model's manifest.
    chosen: the rows that can be evaluated (chosen/RUN/SPLIT).
    rows: the split of the data set (data/DATASET/val.jsonl or test.jsonl). stats: the data set's account.
    answered: the folder to make (answers/RUN/SPLIT): rows.jsonl, left_out.jsonl and report.json.
    settings: those of the run. picture_store: the folder with all picture stores.
    evaluation_store: the folder that keeps answers, and the log of looks at test splits.
    pictures: the image manifests of the data set; none if rows have no pictures.
    """
    run, split = answered.parent.name, answered.name
    proof, base = read_proof(verified), read_model_manifest(model)
    files = SplitFiles(rows, stats, picture_store, pictures)
    drawn = draw_split(
        *(files, read_candidates(chosen, files)),
        count=min(settings.answer.rows, settings.rows),
        key=f"runs.{run}.{'answer' if settings.answer.rows < settings.rows else 'evaluate'}.rows",
        seed=settings.seed,
        part="judges" if split == "val" and fitted_rows(fitted).halved else None,
    )
    length = settings.image_max_tokens, settings.text_args, settings.max_length
    cases, too_long = fitting_cases(drawn, base.folder, pictures, *length)
    out = drawn.out + too_long
    refuse_none(cases, rows, out)
    if settings.text_args:
        log.warning(f"a server does not apply these arguments of the training: {', '.join(sorted(settings.text_args))}")
    how = Asking(
        gold=drawn.gold,
        rounds=settings.answer.rounds,
        max_tokens=settings.answer.max_tokens,
        feedback=drawn.feedback,
        pictures=drawn.pictures,
        store=evaluation_store,
        seed=settings.seed,
    )
    tuned_digest = proven_digest(proof)
    answered_rows, of_base, of_tuned = ask_both(
        cases,
        _model("the base", base.digest, base.folder, settings.answer.url_base, settings, threads),
        _model("the tuned model", tuned_digest, verified, settings.answer.url_tuned, settings, threads),
        how,
    )
    looks = None
    if split == "test":
        looks = record_look(evaluation_store, "answer", run, drawn.dataset, drawn.rows_digest, tuned_digest)
    report = AnswerReport(
        run=run,
        dataset=drawn.dataset,
        split=split,
        left_out=counts_of(out),
        feedback=drawn.feedback,
        looks=looks,
        rows_digest=drawn.rows_digest,
        base=of_base,
        tuned=of_tuned,
        not_applied=sorted(settings.text_args),
        max_tokens=settings.answer.max_tokens,
        seed=settings.seed,
        **figures(answered_rows, how),
        **_server(base.folder, settings),
    )
    with whole_folder(answered) as folder:
        write_lines(folder / "rows.jsonl", answered_rows)
        write_lines(folder / "left_out.jsonl", out)
        write_account(folder / "report.json", report)
    log.info(f"{run}, {split}: {sentence_of(report.all, report.feedback)}")


def _model(
    name: str, digest: str, folder: Path, served_as: str | None, settings: PartOf[FlatRun], threads: int
) -> Model:
    if settings.answer.url is None or served_as is None:
        return OwnModel(name, digest, folder, settings.image_max_tokens, settings.dtype, settings.device, threads)
    return ModelAtUrl(name, digest, settings.answer.url, served_as, key_of(ANSWER_KEY))


def _server(base: Path, settings: PartOf[FlatRun]) -> dict[str, Any]:
    """Return the fields of the report that say what answered, and how pictures were scaled."""
    if settings.answer.url is not None:
        unknown = {"picture_limits": UNKNOWN, "dtype": UNKNOWN, "device": UNKNOWN}
        return {"server": settings.answer.url, "versions": {}, **unknown}
    return {
        "server": "transformers serve",
        "picture_limits": PictureBudget.of(base, settings.image_max_tokens).in_words(),
        "dtype": settings.dtype,
        "device": settings.device,
        "versions": versions(),
    }


if __name__ == "__main__":
    run_stage(main, globals().get("snakemake"))
