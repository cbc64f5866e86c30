"""The page of a run's evaluation: verdict, figures with their intervals, and the rows with most gain and most loss."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from vlmflow.config.row_settings import PictureLimits
from vlmflow.core.account import read_account
from vlmflow.core.errors import VlmflowError
from vlmflow.evaluation.accounts import (
    ANSWER,
    FIRST,
    HISTORY,
    PLACEBO,
    QUESTION,
    EvaluatedRow,
    EvaluationReport,
    Figures,
    Interval,
    left_out_in_words,
    use_of_feedback,
)
from vlmflow.evaluation.answering.accounts import AnsweredRow, AnsweredTurn, AnswerReport
from vlmflow.evaluation.choice import read_case
from vlmflow.evaluation.results import REPORT
from vlmflow.evaluation.verdict import LEARNED, USED_ALREADY, WORSE, shown_figures
from vlmflow.reports.data_page import CHARACTERS_SHOWN, THUMBNAIL, Text
from vlmflow.reports.page import Tile, render
from vlmflow.reports.thumbnails import Shown, thumbnail
from vlmflow.rows.chat import FIRST_LINE
from vlmflow.rows.data_rows import Row, lines_of

ROWS_SHOWN = 6
"""Rows with most gain, and as many with most loss."""

STATEMENTS = 3
"""The first of `shown_figures`, in a data set with feedback; changes of losses follow, on a scale of their own."""

COLOURS = {LEARNED: "good", USED_ALREADY: "maybe", WORSE: "bad"}

PASSES = {
    HISTORY: "after its history",
    QUESTION: "to the question alone",
    PLACEBO: "with another row's feedback",
    FIRST: "first answer",
    ANSWER: "answers",
}
"""The names of the passes, for people."""


@dataclass(frozen=True)
class Range:
    """A figure as a bar. zero, low, high, mean: places in the picture, 0 to 1; low, high: None without an interval."""

    name: str
    text: str
    zero: float
    mean: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class ShownRow:
    """An evaluated row. turns: speaker and text. donor: the feedback of the placebo; None without feedback.

    gain: what the page sorts by, in nats per token. losses: of each pass the name, and the losses of base and tuned.
    answers: what both answered at each turn; [] if the row was not asked.
    """

    id: str
    source: str
    pictures: list[Shown]
    turns: list[tuple[str, Text]]
    donor: Text | None
    gain: float
    losses: list[tuple[str, float, float]]
    answers: list[AnsweredTurn]


@dataclass(frozen=True)
class ShownSplit:
    """The evaluation on one split.

    left_out: the rows that are out, for people. statements: the figures on which the verdict rests. changes: what the
    training changed. sources: the statement of each source, with the number of its rows. passes: the losses of base and
    tuned. gains, losses: the rows with most; where the models were asked, of the rows that they were asked about.
    answers: how often both models answer rightly; None if they were not asked.
    """

    report: EvaluationReport
    colour: str
    tiles: list[Tile]
    left_out: str
    statements: list[Range]
    changes: list[Range]
    sources: list[tuple[str, int, Range]]
    passes: list[tuple[str, float, float]]
    gains: list[ShownRow]
    losses: list[ShownRow]
    answers: AnswerReport | None


@dataclass(frozen=True)
class EvalPage:
    """The page's facts."""

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
    seen = store if has_pictures else None
    splits = [_split(folder, rows[folder.name], answers.get(folder.name), seen, limits) for folder in folders]
    first = splits[0].report
    models = f"{first.device}, {first.dtype}, pictures of at most {first.image_max_tokens:,} tokens"
    return render("eval.html.jinja", EvalPage(f"{first.run}: is it better?", f"{first.dataset} · {models}", splits))


def _split(folder: Path, rows: Path, answers: Path | None, store: Path | None, limits: PictureLimits) -> ShownSplit:
    report = read_account(folder / REPORT, EvaluationReport)
    asked = read_account(answers / REPORT, AnswerReport) if answers else None
    found = list(lines_of(folder / "rows.jsonl", EvaluatedRow))
    said = {row.id: row for row in lines_of(answers / "rows.jsonl", AnsweredRow)} if answers else {}
    by_gain = sorted((row for row in found if row.id in said or not answers), key=lambda row: (_gain(row), row.id))
    gains = [row for row in by_gain[:ROWS_SHOWN] if _gain(row) < 0]
    losses = [row for row in by_gain[::-1][:ROWS_SHOWN] if _gain(row) > 0]
    texts = _texts({name for row in [*gains, *losses] for name in (row.id, row.donor) if name}, rows)
    figures = shown_figures(report.all)
    statements, changes = (figures[:STATEMENTS], figures[STATEMENTS:]) if report.feedback else (figures, [])
    sources = [(name, each.rows, _statement(each)) for name, each in report.sources.items()]
    bars = _ranges([(name, value) for name, _, value in sources])
    return ShownSplit(
        report=report,
        colour=COLOURS.get(report.verdict, "quiet"),
        tiles=_tiles(report, asked),
        left_out=left_out_in_words(report.left_out),
        statements=_ranges(statements),
        changes=_ranges(changes),
        sources=[(name, count, bar) for (name, count, _), bar in zip(sources, bars, strict=True)],
        passes=[(PASSES[name], report.all.base[name], report.all.tuned[name]) for name in report.all.base],
        gains=[_shown(row, texts, said, store, limits) for row in gains],
        losses=[_shown(row, texts, said, store, limits) for row in losses],
        answers=asked,
    )


def _tiles(report: EvaluationReport, asked: AnswerReport | None) -> list[Tile]:
    out = sum(report.left_out.values())
    reasons = ", ".join(f"{count:,} {reason.replace('_', ' ')}" for reason, count in report.left_out.items())
    tiles = [
        Tile("rows", f"{report.rows:,}", f"with {report.groups:,} different pictures or questions"),
        Tile("left out", f"{out:,}", reasons or "none"),
    ]
    if report.looks is not None:
        looks = max(report.looks, (asked and asked.looks) or 0)  # asking for answers is a look, too
        tiles.append(Tile("looks at test", f"{looks:,}", "by all runs on these rows, up to what is shown here"))
    return tiles


def _statement(figures: Figures) -> Interval:
    """Return the figure by which sources are compared."""
    return figures.difference[ANSWER] if figures.learned is None else figures.learned


def _gain(row: EvaluatedRow) -> float:
    """Return by how much the row contributes to the statement; below zero is a gain."""
    if ANSWER in row.base:
        return row.tuned[ANSWER].per_token - row.base[ANSWER].per_token
    return use_of_feedback(row.tuned) - use_of_feedback(row.base)


def _scale(intervals: Iterable[Interval]) -> tuple[float, float]:
    """Return the lowest and highest value of a picture with all of these intervals and zero."""
    values = [0.0, *(end for one in intervals for end in (one.low, one.high, one.mean) if end is not None)]
    low, high = min(values), max(values)
    margin = (high - low) * 0.05 or 1.0
    return low - margin, high + margin


def _ranges(figures: Sequence[tuple[str, Interval]]) -> list[Range]:
    """Return figures as bars of one scale."""
    scale = _scale(value for _, value in figures)
    return [_range(name, value, scale) for name, value in figures]


def _range(name: str, value: Interval, scale: tuple[float, float]) -> Range:
    def place(number: float) -> float:
        return (number - scale[0]) / (scale[1] - scale[0])

    text = f"{value.mean:+.3f}"
    if value.low is None or value.high is None:
        return Range(name, text, place(0), place(value.mean), None, None)
    return Range(
        name,
        f"{text} ({value.low:+.3f} to {value.high:+.3f})",
        place(0),
        place(value.mean),
        place(value.low),
        place(value.high),
    )


def _texts(names: set[str], rows: Path) -> dict[str, Row]:
    """Return some rows of the data set by id."""
    found = {row.id: row for row in lines_of(rows, Row) if row.id in names}
    if missing := sorted(names - found.keys()):
        raise VlmflowError(
            f"{rows}: it has no row {missing[0]}, which was evaluated",
            "the data set has changed since: run the same command again, and the run is made and evaluated again",
        )
    return found


def _shown(
    row: EvaluatedRow,
    texts: Mapping[str, Row],
    answers: Mapping[str, AnsweredRow],
    store: Path | None,
    limits: PictureLimits,
) -> ShownRow:
    turns = texts[row.id].conversations
    pictures = [Shown(thumbnail(store / name, THUMBNAIL, limits), name) for name in row.images] if store else []
    donor = None
    if row.donor is not None:
        feedback = "\n".join(read_case(msgspec.structs.replace(texts[row.donor], images=[]), {}).feedback)
        donor = Text.beginning(feedback, CHARACTERS_SHOWN)
    said: list[tuple[str, Text]] = [
        (turn.speaker, Text.beginning(turn.value.removeprefix(FIRST_LINE), CHARACTERS_SHOWN)) for turn in turns
    ]
    losses = [(PASSES[name], row.base[name].per_token, row.tuned[name].per_token) for name in row.base]
    asked = answers[row.id].turns if row.id in answers else []
    return ShownRow(row.id, row.source, pictures, said, donor, _gain(row), losses, asked)
