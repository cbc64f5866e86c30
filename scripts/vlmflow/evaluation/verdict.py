"""What an evaluation shows: a verdict from two statements with their intervals, and whether a run may be published.

*Uses feedback*: the tuned model's loss on the right answer is lower given the row's own feedback than given another
row's. *Learned to*: this difference is lower than the base's. A statement is shown if its whole 95 % interval is below
zero.
"""

from vlmflow.evaluation.accounts import ANSWER, FIRST, HISTORY, QUESTION, Figures, Interval

LEARNED, USED_ALREADY, NOT_SHOWN, WORSE = "learned", "used already", "not shown", "worse"

NOT_WORSE = "not_worse"
"""The value of `runs.NAME.evaluate.require` for which no loss may have risen, either (`shown_rises`)."""

ACCEPTED = {
    "learned": {LEARNED},
    "uses_feedback": {LEARNED, USED_ALREADY},
    NOT_WORSE: {LEARNED, USED_ALREADY, NOT_SHOWN},
}
"""The verdicts that fulfil `runs.NAME.evaluate.require`, by its value."""


def verdict_of(figures: Figures) -> str:
    """Return the verdict on all rows.

    learned: the tuned model uses feedback, and more than the base. used already: both use it, and more is not shown.
    worse: the tuned model uses it less than the base. Without feedback: learned or worse if the loss of the answers
    fell or rose. Everything else is not shown.
    """
    if figures.learned is None or figures.tuned_uses is None or figures.base_uses is None:
        answers = figures.difference[ANSWER]
        return LEARNED if answers.below_zero else WORSE if answers.above_zero else NOT_SHOWN
    if figures.learned.above_zero:
        return WORSE
    if not figures.tuned_uses.below_zero:
        return NOT_SHOWN
    if figures.learned.below_zero:
        return LEARNED
    return USED_ALREADY if figures.base_uses.below_zero else NOT_SHOWN


def shown_rises(figures: Figures) -> list[str]:
    """Return the declines that are shown apart from the use of feedback: losses that rose, for people.

    With feedback they are those of what the model says in a dialogue: the first answer, and the last one after its
    history. The last answer to the question alone, or after another row's feedback, is no such: it often speaks of
    feedback that is not there.
    """
    names = {FIRST: "the first answer", HISTORY: "the last answer with its history", ANSWER: "the answers"}
    rises = [(name, figures.difference[each]) for each, name in names.items() if each in figures.difference]
    return [f"the loss of {name} rose: {_in_words(rise)} nats per token" for name, rise in rises if rise.above_zero]


def sentence_of(verdict: str, figures: Figures) -> str:
    """Return the verdict for people, with the figures on which it rests."""
    if figures.learned is None or figures.tuned_uses is None or figures.base_uses is None:
        answers = figures.difference[ANSWER]
        begins = {
            LEARNED: "The tuned model predicts the answers better than its base",
            WORSE: "The tuned model predicts the answers worse than its base",
            NOT_SHOWN: "No difference between the tuned model and its base is shown",
        }
        return f"{begins[verdict]}: {_in_words(answers)} nats per token.{_too_few(answers)}"
    begins = {
        LEARNED: "The tuned model uses feedback, and learned to",
        USED_ALREADY: "The tuned model uses feedback, but its base does so too",
        NOT_SHOWN: "It is not shown that the tuned model learned to use feedback",
        WORSE: "The tuned model uses feedback less than its base",
    }
    return (
        f"{begins[verdict]}: with its own feedback instead of another row's, the loss on the right answer changes by "
        f"{_in_words(figures.tuned_uses)} nats per token; base {_in_words(figures.base_uses)}; difference "
        f"{_in_words(figures.learned)}. The loss of the first answer changed by "
        f"{_in_words(figures.difference[FIRST])}.{_too_few(figures.learned)}"
    )


def shown_figures(figures: Figures) -> list[tuple[str, Interval]]:
    """Return the figures that card and page show, with their names: differences in nats per token."""
    if figures.tuned_uses is None or figures.base_uses is None or figures.learned is None:
        return [("loss of the answers, tuned minus base", figures.difference[ANSWER])]
    return [
        ("own minus another row's feedback, tuned", figures.tuned_uses),
        ("own minus another row's feedback, base", figures.base_uses),
        ("difference of these two", figures.learned),
        ("loss of the first answer, tuned minus base", figures.difference[FIRST]),
        ("loss of the last answer with its history, tuned minus base", figures.difference[HISTORY]),
        ("loss of the last answer to the question alone, tuned minus base", figures.difference[QUESTION]),
    ]


def _in_words(interval: Interval) -> str:
    if interval.low is None or interval.high is None:
        return f"{interval.mean:+.3f}"
    return f"{interval.mean:+.3f} [{interval.low:+.3f}, {interval.high:+.3f}]"


def _too_few(interval: Interval) -> str:
    return "" if interval.low is not None else " There are too few pictures or questions for intervals."
