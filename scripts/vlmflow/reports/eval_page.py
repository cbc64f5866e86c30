"""The page of a run's evaluation: verdict, shares of rows with their intervals, and the rows behind them.

Of these the page shows the ones in which the tuned model and its base differ most, with what the models read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from vlmflow.config.settings import PictureLimits
from vlmflow.core.account import read_account
from vlmflow.core.errors import VlmflowError
from vlmflow.evaluation.choice import Case, read_case, with_right_last
from vlmflow.evaluation.report import (
    OTHERS,
    OWN,
    QUESTION,
    AnsweredRow,
    AnswerReport,
    EvaluatedRow,
    EvaluationReport,
    Margin,
)
from vlmflow.evaluation.verdict import CONDITIONS, REPORT, row_shares
from vlmflow.reports.data_page import thumbnail
from vlmflow.reports.eval_figures import FUNCTIONS, colour_of, decides, names_of, scale_of
from vlmflow.reports.page import render
from vlmflow.rows.sharegpt import ShareGptRow, lines_of

ROWS_SHOWN = 6
"""Rows that gained most, and as many that lost most."""


@dataclass(frozen=True)
class Split:
    """The evaluation on one split.

    better, worse: the rows in which the tuned model differs from its base, those that changed most first. cases: the
    first ones of both, and the rows that give their controls, by id. answer_report: how often both models answer
    rightly; None if they generated no answers. answers: by the id of their row.
    """

    report: EvaluationReport
    better: list[EvaluatedRow]
    worse: list[EvaluatedRow]
    cases: dict[str, Case]
    answer_report: AnswerReport | None
    answers: dict[str, AnsweredRow]


def eval_page(
    folders: Sequence[Path],
    rows: Mapping[str, Path],
    answers: Mapping[str, Path],
    store: Path,
    limits: PictureLimits,
    has_pictures: bool,
) -> str:
    """Return the page.

    folders: eval/RUN/SPLIT of every split to show. rows: the data set's file of each split. answers: answers/RUN/SPLIT
    of the splits on which the models were asked. store: the data set's pictures. limits: theirs. has_pictures: whether
    rows have pictures.

    Raises VlmflowError if a file has a damaged line, or an evaluated row is not in the data set.
    """
    return render(
        "eval.html.jinja",
        splits=[_split(folder, rows[folder.name], answers.get(folder.name)) for folder in folders],
        rows_shown=ROWS_SHOWN,
        has_pictures=has_pictures,
        thumbnail=lambda name, side: thumbnail(store / name, side, limits),
        change_of=change_of,
        colour_of=colour_of,
        decides=decides,
        names_of=names_of,
        conditions=CONDITIONS,
        scale_of=scale_of,
        **FUNCTIONS,
    )


def _split(folder: Path, rows: Path, answers: Path | None) -> Split:
    """Read an evaluation. rows: the split of the data set. answers: answers/RUN/SPLIT, if the models were asked."""
    report = read_account(folder / REPORT, EvaluationReport)
    evaluated = list(lines_of(folder / "rows.jsonl", EvaluatedRow))
    if len(evaluated) != report.rows:
        raise VlmflowError(
            f"{folder}: rows.jsonl has {len(evaluated):,} rows, and {REPORT} is of {report.rows:,}",
            f"remove {folder} and run the same command again",
        )
    answer_report = read_account(answers / REPORT, AnswerReport) if answers else None
    answered = {row.id: row for row in lines_of(answers / "rows.jsonl", AnsweredRow)} if answers else {}
    different = [row for row in evaluated if _differs(row) and (row.id in answered or not answers)]
    different.sort(key=lambda row: (-change_of(row), row.id))
    better = [row for row in different if change_of(row) > 0]
    worse = [row for row in different[::-1] if change_of(row) < 0]
    cases = _cases([*better[:ROWS_SHOWN], *worse[:ROWS_SHOWN]], rows)
    return Split(report, better, worse, cases, answer_report, answered)


def change_of(row: EvaluatedRow) -> float:
    """Return by how much a row speaks for the tuned model, in nats per token.

    It is what the own feedback adds to the margin, compared with other rows' on average; tuned minus base. Without
    feedback it is what the log-probability of the answers gained.
    """

    def shown_by(margins: dict[str, Margin]) -> float:
        others = [margins[context].value for context in OTHERS if context in margins]
        return margins[OWN].value - fmean(others) if others else margins[QUESTION].value

    return shown_by(row.tuned) - shown_by(row.base)


def _differs(row: EvaluatedRow) -> bool:
    """Return whether the models differ in the row's part of the figure on which the verdict rests."""
    base, tuned = (row_shares(margins).get("uses_feedback") for margins in (row.base, row.tuned))
    return change_of(row) != 0 if base is None else base != tuned


def _cases(rows: Sequence[EvaluatedRow], file: Path) -> dict[str, Case]:
    """Return rows, and those that give their controls, as they were evaluated; by id. file: the split of the data set.

    Raises VlmflowError if a row is not in the file as it was evaluated.
    """
    names = {name for row in rows for name in (row.id, *row.donors, row.picture_donor) if name}
    feedback = any(row.donors for row in rows)
    cases = {}
    for row in lines_of(file, ShareGptRow):
        if row.id in names:
            case = read_case(row, dict.fromkeys(row.images, ""))  # digests only tell its group
            cut = with_right_last(case) if feedback else case
            if isinstance(cut, Case):
                cases[row.id] = cut
    if missing := sorted(names - cases.keys()):
        raise VlmflowError(
            f"{file}: it has no row {missing[0]} as it was evaluated",
            "the data set has changed since: run the same command again, and the run is made and evaluated again",
        )
    return cases
