"""Ask a run's proven weights and their base the questions of a split, and score the answers."""

import logging
import os
from itertools import chain
from pathlib import Path
from typing import Any

from harness.stage import run_stage
from vlmflow.config.answer_settings import AnswerSettings
from vlmflow.config.raw_forms import has_feedback
from vlmflow.config.settings import Settings
from vlmflow.core.account import read_account, write_account
from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import whole_folder
from vlmflow.core.integrity import refuse_other_rows
from vlmflow.evaluation.answering.accounts import AnswerReport
from vlmflow.evaluation.answering.models import Model, ModelAtUrl, OwnModel, versions
from vlmflow.evaluation.answering.report import Asking, ask_both, figures, sentence_of, too_long
from vlmflow.evaluation.evaluate import choose_rows, counts_of, tokenizer_of, write_lines
from vlmflow.evaluation.looks import record_look
from vlmflow.fetch.model_folder import read_model_manifest
from vlmflow.lengths.chat_form import ChatForm
from vlmflow.lengths.count import TokenCounter
from vlmflow.merging.proof import proven_digest, read_proof
from vlmflow.pictures.image_manifest import name_and_digest, read_picture_manifest
from vlmflow.pictures.store import refuse_changed_pictures
from vlmflow.rows.data_rows import Row, lines_of
from vlmflow.rows.stats import Stats
from vlmflow.rows.training_data import entries_named, pictures_in
from vlmflow.serving.picture_limits import FEWEST_TOKENS, limited_processor

KEY = "VLMFLOW_ANSWER_KEY"
"""The environment variable with the key of a server at `url`."""

UNKNOWN = "unknown"

log = logging.getLogger("vlmflow")


class RunBlock(Settings):
    """The run's settings that this stage uses; see docs/config.md."""

    answer: AnswerSettings
    feedback: bool | None
    seed: int
    text_args: dict[str, Any]
    image_max_tokens: int
    max_length: int
    device: str
    dtype: str


def main(
    *,
    verified: Path,
    model: Path,
    rows: Path,
    stats: Path,
    answered: Path,
    settings: RunBlock,
    picture_store: Path,
    evaluation_store: Path,
    pictures: list[Path] | None = None,
    threads: int = 1,
) -> None:
    """Ask about one split.

    verified: the proven folder (verified/RUN). model: folder with the base model's manifest.
    rows: the split of the data set (data/DATASET/val.jsonl or test.jsonl). stats: the data set's account.
    answered: the folder to make (answers/RUN/SPLIT): rows.jsonl, left_out.jsonl and report.json.
    settings: those of the run. picture_store: the folder with all picture stores.
    evaluation_store: the folder that keeps answers, and the log of looks at test splits.
    pictures: the image manifests of the data set; none if rows have no pictures.
    """
    run, split = answered.parent.name, answered.name
    proof, base, account = read_proof(verified), read_model_manifest(model), read_account(stats, Stats)
    refuse_other_rows(stats, [rows])
    store = picture_store / account.dataset
    entries = entries_named(pictures_in(rows), pictures or [])
    refuse_changed_pictures(store, entries.values())
    feedback = has_feedback(account.kind) if settings.feedback is None else settings.feedback
    last_answer_only = account.form == "timestep"
    chosen, out = choose_rows(
        lines_of(rows, Row),
        dict(map(name_and_digest, entries.values())),
        tokenizer_of(base.folder),
        feedback=feedback,
        last_answer_only=last_answer_only,
        count=settings.answer.rows,
        seed=settings.seed,
    )
    all_pictures = chain.from_iterable(map(read_picture_manifest, pictures or []))
    form = ChatForm.of(settings.text_args, last_answer_only)
    counter = TokenCounter(base.folder, all_pictures, settings.image_max_tokens, form)
    cases, long = too_long([each.case for each in chosen], counter, settings.max_length)
    out += long
    if not cases:
        reasons = ", ".join(f"{count} {reason}" for reason, count in counts_of(out).items()) or "it has none"
        raise VlmflowError(
            f"{rows}: no row can be asked: {reasons}",
            "docs/evaluation.md describes which rows can be; take more val or test rows (datasets.NAME.val_share, "
            "test, test_share), or set runs.NAME.evaluate.feedback: false if the human's later turns are not feedback",
        )
    if settings.text_args:
        log.warning(f"a server does not apply these arguments of the training: {', '.join(sorted(settings.text_args))}")
    tuned_digest, rows_digest = proven_digest(proof), account.digests[rows.name]
    how = Asking(settings.answer.rounds, settings.answer.max_tokens, feedback, store, evaluation_store, settings.seed)
    found, of_base, of_tuned = ask_both(
        cases,
        _model("the base", base.digest, base.folder, settings.answer.url_base, settings, threads),
        _model("the tuned model", tuned_digest, verified, settings.answer.url_tuned, settings, threads),
        how,
    )
    looks = None
    if split == "test":
        looks = record_look(evaluation_store, "answer", run, account.dataset, rows_digest, tuned_digest)
    report = AnswerReport(
        run=run,
        dataset=account.dataset,
        split=split,
        left_out=counts_of(out),
        feedback=feedback,
        looks=looks,
        rows_digest=rows_digest,
        base=of_base,
        tuned=of_tuned,
        not_applied=sorted(settings.text_args),
        max_tokens=settings.answer.max_tokens,
        seed=settings.seed,
        **figures(found, how),
        **_server(base.folder, settings),
    )
    with whole_folder(answered) as folder:
        write_lines(folder / "rows.jsonl", found)
        write_lines(folder / "left_out.jsonl", out)
        write_account(folder / "report.json", report)
    log.info(f"{run}, {split}: {sentence_of(report.all)}")


def _model(name: str, digest: str, folder: Path, served_as: str | None, settings: RunBlock, threads: int) -> Model:
    if settings.answer.url is None or served_as is None:
        return OwnModel(name, digest, folder, settings.image_max_tokens, settings.dtype, settings.device, threads)
    return ModelAtUrl(name, digest, settings.answer.url, served_as, os.environ.get(KEY))


def _server(base: Path, settings: RunBlock) -> dict[str, Any]:
    """Return the fields of the report that say what answered, and how pictures were scaled."""
    if settings.answer.url is not None:
        unknown = {"picture_limits": UNKNOWN, "dtype": UNKNOWN, "device": UNKNOWN}
        return {"server": settings.answer.url, "versions": {}, **unknown}
    sees = limited_processor(base, settings.image_max_tokens) is not None
    return {
        "server": "transformers serve",
        "picture_limits": f"{FEWEST_TOKENS} to {settings.image_max_tokens} tokens" if sees else "no pictures",
        "dtype": settings.dtype,
        "device": settings.device,
        "versions": versions(),
    }


if __name__ == "__main__":
    run_stage(main, globals().get("snakemake"))
