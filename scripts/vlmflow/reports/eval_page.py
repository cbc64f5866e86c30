"""The page of a run's evaluation: verdict, shares of rows with their intervals, and the rows behind them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vlmflow.config.settings import PictureLimits
from vlmflow.core.account import read_account
from vlmflow.core.errors import VlmflowError
from vlmflow.evaluation.report import AnsweredRow, AnswerReport, EvaluatedRow, EvaluationReport, left_out_in_words
from vlmflow.evaluation.verdict import REPORT
from vlmflow.reports.eval_figures import (
    ShownFigures,
    ShownLoss,
    ShownShare,
    by_source,
    colour_of,
    decides,
    shown_figures,
)
from vlmflow.reports.eval_rows import ChangedRows, Pictures, changed_rows
from vlmflow.reports.page import Tile, render
from vlmflow.rows.sharegpt import lines_of


@dataclass(frozen=True)
class ShownSplit:
    """The evaluation on one split.

    left_out: the rows that are out, for people. figures: of all rows, and without those whose feedback contains the
    gold answer. sources: of each the name, its number of rows, and the figure on which the verdict rests. gains,
    losses: the rows in which the models differ; where they were asked, of the rows that they were asked about.
    answers: how often both models answer rightly; None if they were not asked.
    """

    report: EvaluationReport
    colour: str
    tiles: list[Tile]
    left_out: str
    figures: list[ShownFigures]
    sources: list[tuple[str, int, ShownShare | ShownLoss]]
    gains: ChangedRows
    losses: ChangedRows
    answers: AnswerReport | None


@dataclass(frozen=True)
class EvalPage:
    """What the template `eval.html.jinja` shows."""

    title: str
    subtitle: str
    splits: list[ShownSplit]


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
    pictures = Pictures(store if has_pictures else None, limits)
    splits = [_split(folder, rows[folder.name], answers.get(folder.name), pictures) for folder in folders]
    first = splits[0].report
    models = f"{first.device}, {first.dtype}, pictures of at most {first.image_max_tokens:,} tokens"
    return render("eval.html.jinja", EvalPage(f"{first.run}: is it better?", f"{first.dataset} · {models}", splits))


def _split(folder: Path, rows: Path, answers: Path | None, pictures: Pictures) -> ShownSplit:
    report = read_account(folder / REPORT, EvaluationReport)
    asked = read_account(answers / REPORT, AnswerReport) if answers else None
    said = {row.id: row for row in lines_of(answers / "rows.jsonl", AnsweredRow)} if answers else {}
    evaluated = list(lines_of(folder / "rows.jsonl", EvaluatedRow))
    if len(evaluated) != report.rows:
        raise VlmflowError(
            f"{folder}: rows.jsonl has {len(evaluated):,} rows, and {REPORT} is of {report.rows:,}",
            f"remove {folder} and run the same command again",
        )
    gains, losses = changed_rows((row for row in evaluated if row.id in said or not answers), rows, said, pictures)
    return ShownSplit(
        report=report,
        colour=colour_of(report),
        tiles=_tiles(report, asked),
        left_out=left_out_in_words(report.left_out),
        figures=shown_figures(report),
        sources=by_source(report),
        gains=gains,
        losses=losses,
        answers=asked,
    )


def _tiles(report: EvaluationReport, asked: AnswerReport | None) -> list[Tile]:
    out = sum(report.left_out.values())
    reasons = ", ".join(f"{count:,} {reason.replace('_', ' ')}" for reason, count in report.left_out.items())
    tiles = [
        Tile("rows", f"{report.rows:,}", f"with {report.groups:,} different pictures or questions"),
        Tile("left out", f"{out:,}", reasons or "none"),
        Tile("the models differ in", f"{decides(report.figures.all).different:,}", "rows, on which the verdict rests"),
    ]
    if report.looks is not None:
        looks = max(report.looks, (asked and asked.looks) or 0)  # asking for answers is a look, too
        tiles.append(Tile("looks at test", f"{looks:,}", "by all runs on these rows, up to what is shown here"))
    return tiles
