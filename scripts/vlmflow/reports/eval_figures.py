"""The figures of an evaluation in words, for its page and the model card: which they are, and how they are written."""

from collections.abc import Iterable, Sequence

from vlmflow.core.errors import counted
from vlmflow.evaluation.report import (
    NEUTRAL,
    OTHER_PICTURE,
    OTHERS,
    OWN,
    QUESTION,
    Compared,
    EvaluationReport,
    Interval,
    MarginFigures,
    left_out_in_words,
)
from vlmflow.evaluation.verdict import LEARNED, WORSE, shown_shares

WITH_FEEDBACK = {
    QUESTION: "to the question alone",
    OWN: "with its own feedback",
    NEUTRAL: "with neutral feedback",
    **dict(zip(OTHERS, ("with another row's feedback", "with a second row's", "with a third row's"), strict=True)),
    OTHER_PICTURE: "with another row's picture",
}
ANSWERS_ALONE = {QUESTION: "after the row's own turns", OTHER_PICTURE: "with another row's picture"}
"""What stands before the scored answers, for people: in a data set with feedback, and in one without."""


def names_of(contexts: Iterable[str]) -> dict[str, str]:
    """Return the names of contexts, for people."""
    return WITH_FEEDBACK if OWN in contexts else ANSWERS_ALONE


def figures_of(report: EvaluationReport) -> list[tuple[str, MarginFigures]]:
    """Return the figures of all rows, and of those with and without echo or gold answer in the feedback, by names."""
    figures = report.figures
    gold, echo = "whose feedback contains the gold answer", "whose right answer repeats a word of its feedback (echo)"
    parts = [
        (echo, figures.with_echo, figures.without_echo),
        (gold, figures.with_gold, figures.without_gold),
    ]
    named = [("all rows", figures.all)]
    for what, having, others in parts:
        count = counted(figures.all.rows - others.rows if others else figures.all.rows, "row")
        named += [(f"without {count} {what}", others)] if others else []
        named += [(f"the {count} {what}", having)] if having else []
    return named


def losses_of(figures: MarginFigures) -> list[tuple[str, Compared]]:
    """Return the losses that page and card show, in nats per token, with their names."""
    names, answers = names_of(figures.losses), "the right answer" if OWN in figures.losses else "the answers"
    losses = []
    for context, compared in figures.losses.items():
        # Only some rows may have a picture.
        some = "" if compared.rows == figures.rows else f" ({compared.rows:,} of {counted(figures.rows, 'row')})"
        losses.append((f"loss of {answers}, {names[context]}{some}", compared))
    return losses


def decides(figures: MarginFigures) -> Compared:
    """Return the figure on which the verdict rests: *uses feedback*, without feedback the loss of the answers."""
    return figures.uses_feedback or figures.losses[QUESTION]


def colour_of(report: EvaluationReport) -> str:
    """Return the class of a verdict in pages."""
    if report.verdict == WORSE:
        return "bad"
    return "good" if report.verdict == LEARNED and not report.costs_first_answers else "maybe"


def scale_of(compared: Sequence[Compared]) -> tuple[float, float]:
    """Return the lowest and highest value of a picture with the changes of these figures and zero."""
    changes = [change.difference for change in compared]
    values = [0.0, *(end for change in changes for end in (change.low, change.high, change.mean) if end is not None)]
    low, high = min(values), max(values)
    margin = (high - low) * 0.05 or 1.0
    return low - margin, high + margin


UNITS = {"percent": (100, "{:.1f}", "%"), "points": (100, "{:+.1f}", " points"), "nats": (1, "{:+.3f}", "")}
"""Factor, form and sign of a share, of its change, and of the change of a loss."""


def interval(value: Interval, unit: str) -> str:
    """Return a mean with its interval for people. unit: a key of UNITS."""
    factor, form, sign = UNITS[unit]
    ends = [form.format(factor * end) for end in (value.low, value.high) if end is not None]
    return f"{form.format(factor * value.mean)}{sign} ({' to '.join(ends) or 'no interval'})"


FUNCTIONS = {
    "figures_of": figures_of,
    "shares_of": shown_shares,
    "losses_of": losses_of,
    "interval": interval,
    "left_out_in_words": left_out_in_words,
}
"""What page and card call to show an evaluation."""
