"""The figures of an evaluation for people: shares of rows, and losses, of both models with their intervals."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from vlmflow.core.errors import counted
from vlmflow.evaluation.report import (
    OTHER,
    OTHER_PICTURE,
    OWN,
    QUESTION,
    Compared,
    EvaluationReport,
    Interval,
    MarginFigures,
)
from vlmflow.evaluation.verdict import LEARNED, WORSE, shown_shares

WITH_FEEDBACK = {
    QUESTION: "to the question alone",
    OWN: "with its own feedback",
    OTHER: "with another row's feedback",
    OTHER_PICTURE: "with another row's picture",
}
ANSWERS_ALONE = {QUESTION: "after the row's own turns", OTHER_PICTURE: "with another row's picture"}
"""What stands before the scored answers, for people: in a data set with feedback, and in one without."""


@dataclass(frozen=True)
class Bar:
    """A figure as a bar.

    mark: one half for a share, no change for a loss. mark, mean, low, high: places in the picture, 0 to 1; low, high:
    None without an interval.
    """

    text: str
    mark: float
    mean: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class ShownShare:
    """A share of rows. name: what is so in them. change: tuned minus base. different: rows in which both differ."""

    name: str
    base: Bar
    tuned: Bar
    change: str
    different: int
    rows: int


@dataclass(frozen=True)
class ShownLoss:
    """A mean loss, in nats per token. change: tuned minus base."""

    name: str
    base: float
    tuned: float
    change: Bar


@dataclass(frozen=True)
class ShownFigures:
    """The figures of some rows. name: which rows."""

    name: str
    shares: list[ShownShare]
    losses: list[ShownLoss]


def shown_figures(report: EvaluationReport) -> list[ShownFigures]:
    """Return the figures of all rows, and of those whose feedback does not contain the gold answer."""
    figures = report.figures
    found = [("all rows", figures.all)]
    if rest := figures.without_gold:
        found.append(
            (f"without {counted(figures.all.rows - rest.rows, 'row')} whose feedback contains the gold answer", rest)
        )
    return [
        ShownFigures(name, [_share(*each) for each in shown_shares(some)], _shown_losses(losses_of(some)))
        for name, some in found
    ]


def by_source(report: EvaluationReport) -> list[tuple[str, int, ShownShare | ShownLoss]]:
    """Return of each source its name, its number of rows, and the figure on which the verdict rests."""
    sources = report.figures.sources
    losses = _shown_losses([(name, figures.losses[QUESTION]) for name, figures in sources.items()])
    return [
        (name, figures.rows, _share(*shown_shares(figures)[0]) if figures.uses_feedback else loss)
        for (name, figures), loss in zip(sources.items(), losses, strict=True)
    ]


def losses_of(figures: MarginFigures) -> list[tuple[str, Compared]]:
    """Return the losses that page and card show, in nats per token, with their names."""
    names = names_of(figures.losses)
    what = "the right answer" if OWN in figures.losses else "the answers"
    return [
        (f"loss of {what}, {names[context]}{_some(compared, figures)}", compared)
        for context, compared in figures.losses.items()
    ]


def _some(compared: Compared, figures: MarginFigures) -> str:
    """Return of how many rows a figure is, if not of all: only some may have a picture."""
    return "" if compared.rows == figures.rows else f" ({compared.rows:,} of {counted(figures.rows, 'row')})"


def names_of(contexts: Iterable[str]) -> dict[str, str]:
    """Return the names of contexts, for people."""
    return WITH_FEEDBACK if OWN in contexts else ANSWERS_ALONE


def decides(figures: MarginFigures) -> Compared:
    """Return the figure on which the verdict rests: *uses feedback*, without feedback the loss of the answers."""
    return figures.uses_feedback or figures.losses[QUESTION]


def colour_of(report: EvaluationReport) -> str:
    """Return the class of a verdict in pages."""
    if report.verdict == WORSE:
        return "bad"
    return "good" if report.verdict == LEARNED and not report.costs_first_answers else "maybe"


def _share(name: str, share: Compared) -> ShownShare:
    def bar(value: Interval) -> Bar:
        return Bar(_in_words(value, lambda share: f"{100 * share:.1f}", "%"), 0.5, value.mean, value.low, value.high)

    change = _in_words(share.difference, lambda share: f"{100 * share:+.1f}", " points")
    return ShownShare(name, bar(share.base), bar(share.tuned), change, share.different, share.rows)


def _shown_losses(losses: Sequence[tuple[str, Compared]]) -> list[ShownLoss]:
    """Return losses with their changes as bars of one scale."""
    low, high = _scale([each.difference for _, each in losses])

    def place(value: float) -> float:
        return (value - low) / (high - low)

    def bar(value: Interval) -> Bar:
        text = _in_words(value, "{:+.3f}".format, "")
        ends = [None if end is None else place(end) for end in (value.low, value.high)]
        return Bar(text, place(0), place(value.mean), *ends)

    return [ShownLoss(name, each.base.mean, each.tuned.mean, bar(each.difference)) for name, each in losses]


def _scale(intervals: Iterable[Interval]) -> tuple[float, float]:
    """Return the lowest and highest value of a picture with all of these intervals and zero."""
    values = [0.0, *(end for one in intervals for end in (one.low, one.high, one.mean) if end is not None)]
    low, high = min(values), max(values)
    margin = (high - low) * 0.05 or 1.0
    return low - margin, high + margin


def _in_words(value: Interval, number: Callable[[float], str], unit: str) -> str:
    if value.low is None or value.high is None:
        return f"{number(value.mean)}{unit} (no interval)"
    return f"{number(value.mean)}{unit} ({number(value.low)} to {number(value.high)})"
