"""Tells each evaluated row as two traces, one for each model: what it was asked and what it answered, with scores."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from vlmflow.core.account import read_account
from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import count_lines, sha256_of
from vlmflow.core.printable import counted
from vlmflow.evaluation.accounts import EvaluatedRow, EvaluationReport
from vlmflow.evaluation.answering.accounts import AnsweredRow, AnswerReport
from vlmflow.evaluation.choice import Case, with_right_last
from vlmflow.evaluation.results import REPORT
from vlmflow.evaluation.row_shares import row_shares
from vlmflow.pictures.image_manifest import name_and_digest
from vlmflow.rows.chat import ROLES
from vlmflow.rows.data_rows import lines_of
from vlmflow.rows.sharegpt import ShareGptRow
from vlmflow.rows.training_data import entries_named, pictures_in
from vlmflow.track.accounts import RowTrace, Turn

Model = Literal["base", "tuned"]

ROWS = "rows.jsonl"
"""The rows in a folder eval/RUN/SPLIT or answers/RUN/SPLIT."""

MODELS: tuple[Model, ...] = ("base", "tuned")

SCORES = ("right", "exact_match", "token_f1", "anls", "relaxed_accuracy")
"""The scores of an answer, as `ModelAnswer` has them."""


def row_traces(
    evaluated: Path, answered: Path | None, rows: Path, manifests: Sequence[Path], at: float
) -> list[RowTrace]:
    """Return the traces of one split, in the order of its rows.

    evaluated: eval/RUN/SPLIT. answered: answers/RUN/SPLIT, if the models were asked. rows: data/DATASET/SPLIT.jsonl.
    manifests: the data set's image manifests; none without pictures. at: as in `RowTrace`.

    Raises VlmflowError if the rows are not those of the evaluation, a picture is in no manifest, or a file is missing
    or damaged.
    """
    report = read_account(evaluated / REPORT, EvaluationReport)
    for made in (evaluated, answered):
        if made and not (made / ROWS).is_file():
            raise VlmflowError(f"{made / ROWS}: is missing", f"remove {made}, and make it again")
    if not rows.is_file():
        raise VlmflowError(
            f"{rows}: is missing; traces show its rows",
            f"make it: .venv/bin/snakemake … -- data/{report.dataset}/{rows.name}; or leave otlp out",
        )
    if sha256_of(rows) != report.rows_digest:
        raise VlmflowError(
            f"{rows}: it has changed since {evaluated} was made from it",
            f"evaluate again: remove {evaluated}, and run the same command again",
        )
    _refuse_other_number(evaluated, report.rows)
    said = _answers(answered, report) if answered else {}
    digests = dict(map(name_and_digest, entries_named(pictures_in(rows), manifests).values()))
    compared = {row.id: row for row in lines_of(evaluated / ROWS, EvaluatedRow)}
    told = [row for row in lines_of(rows, ShareGptRow) if row.id in compared or row.id in said]
    for row in told:
        if unknown := [name for name in row.images if name not in digests]:
            raise VlmflowError(
                f"{rows}, row {row.id}: picture {unknown[0]} is in no image manifest "
                f"({', '.join(map(str, manifests)) or 'none'})",
                f"check the pictures again: make refresh-pictures DATASET={report.dataset}",
            )
    return [
        RowTrace(
            identity="\0".join([report.run, report.tuned.digest, report.split, row.id, model]),
            run=report.run,
            split=report.split,
            row=row.id,
            source=row.source,
            model=model,
            pictures=[digests[name] for name in row.images],
            at=at,
            turns=[*_answered(said.get(row.id), model), *_scored(row, compared.get(row.id), model)],
        )
        for row in told
        for model in MODELS
    ]


def _answers(answered: Path, evaluation: EvaluationReport) -> dict[str, AnsweredRow]:
    """Return the answered rows by id; raises VlmflowError if some are lost, or are of other weights than evaluated."""
    report = read_account(answered / REPORT, AnswerReport)
    if report.tuned.digest != evaluation.tuned.digest:
        raise VlmflowError(
            f"{answered}: its answers are of other weights than those of eval/{evaluation.run}/{evaluation.split}",
            f"ask again: remove {answered}, and run the same command again",
        )
    _refuse_other_number(answered, report.rows)
    return {row.id: row for row in lines_of(answered / ROWS, AnsweredRow)}


def _refuse_other_number(made: Path, rows: int) -> None:
    """Raise VlmflowError if a folder's rows are not as many as its report counts: half of them would count as sent."""
    if (there := count_lines(made / ROWS)) != rows:
        raise VlmflowError(
            f"{made / ROWS}: has {there:,} rows, but {REPORT} beside it counts {rows:,}",
            f"remove {made}, and make it again",
        )


def _answered(said: AnsweredRow | None, model: Model) -> Iterator[Turn]:
    for turn in said.turns if said else ():
        answer = turn.base if model == "base" else turn.tuned
        scores = {name: float(getattr(answer, name)) for name in SCORES}
        facts = {"gold": turn.gold, "rule": turn.rule, "reference": turn.reference, "cut": str(answer.cut).lower()}
        yield Turn(f"after {counted(turn.rounds, 'round')}", turn.prompt, answer.text, scores, facts)


def _scored(row: ShareGptRow, found: EvaluatedRow | None, model: Model) -> Iterator[Turn]:
    if found is not None:
        case = with_right_last(Case(row, found.group)) if found.right is not None else None
        *before, last = case.row.conversations if isinstance(case, Case) else row.conversations
        history = "\n\n".join(f"{ROLES[turn.speaker]}: {turn.value}" for turn in before)
        facts = {"gold": found.right or last.value} | ({} if found.wrong is None else {"wrong": found.wrong})
        yield Turn("gold answer", history, None, _scores(found, model), facts)


def _scores(found: EvaluatedRow, model: Model) -> dict[str, float]:
    """Return the margins of a row, the losses of its right answer, and what it adds to each share: 0, 1 or one half."""
    margins = found.base if model == "base" else found.tuned
    scores = {f"margin_{context}": margin.value for context, margin in margins.items()}
    scores |= {f"loss_{context}": margin.right.per_token for context, margin in margins.items()}
    return scores | row_shares(margins)


def all_traces(
    evaluated: Sequence[Path],
    answered: Sequence[Path],
    rows: Mapping[str, Path],
    manifests: Sequence[Path],
    at: float,
) -> list[RowTrace]:
    """Return the traces of all evaluated splits; `rows` has the data set's file of each. Raises as `row_traces`."""
    said = {folder.name: folder for folder in answered}
    return [
        trace
        for folder in evaluated
        for trace in row_traces(folder, said.get(folder.name), rows[folder.name], manifests, at)
    ]
