"""What an evaluation shows: a verdict from two statements with their intervals, and whether a run may be published.

*Uses feedback*: the tuned model's loss on the right answer is lower given the row's own feedback than given another
row's. *Learned to*: this difference is lower than the base's. A statement is shown if its whole 95 % interval is below
zero.
"""

import msgspec

from vlmflow.evaluation.accounts import (
    ANSWER,
    FEWEST_GROUPS,
    FIRST,
    HISTORY,
    OWN,
    QUESTION,
    Compared,
    Figures,
    Interval,
    MarginFigures,
)

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


NO_GAIN, TOO_FEW = "no gain shown", "too few rows"

FEWEST_DIFFERENT = 10
"""With fewer rows in which the models differ there is no verdict: four that all change one way may be chance."""

NEAR_CEILING = 0.9
"""A base that uses feedback in this share of rows leaves little to gain."""


class Verdict(msgspec.Struct, frozen=True):
    """What margins show.

    name: LEARNED, WORSE, NO_GAIN or TOO_FEW. costs_first_answers: whether the tuned model is shown to prefer the right
    answer less often than its base before any feedback. sentence: all of it for people.
    """

    name: str
    costs_first_answers: bool
    sentence: str


def judge(figures: MarginFigures) -> Verdict:
    """Return the verdict on rows.

    A figure rose or fell if the interval of tuned minus base is above or below 0.
    learned: *uses feedback* rose, and the answer with its own feedback did not suffer: *right over wrong* did not fall,
    or, of rows with one answer, the loss did not rise. worse: *uses feedback* fell, and that answer suffered.
    Without feedback the loss of the answers alone decides.
    """
    uses, first = figures.uses_feedback, figures.right_first
    change = (uses or figures.losses[QUESTION]).difference
    if _missing(uses or figures.losses[QUESTION]):
        name = TOO_FEW
    elif uses and change.above_zero and not _suffered(figures):
        name = LEARNED
    elif uses:
        name = WORSE if change.below_zero and _suffered(figures) else NO_GAIN
    else:
        name = LEARNED if change.below_zero else WORSE if change.above_zero else NO_GAIN
    costs = first is not None and first.difference.below_zero
    return Verdict(name, costs, " ".join(_sentences(name, costs, figures)))


def falls_short(require: str, verdict: Verdict, figures: MarginFigures) -> str | None:
    """Return why a run does not fulfil `runs.NAME.evaluate.require`, for people; None if it does.

    learned: the verdict. uses_feedback: the tuned model's *uses feedback* is above one half by its interval. not_worse:
    the verdict is not worse, and the training is not shown to cost first answers.
    """
    if require == "learned" and verdict.name != LEARNED:
        return f"the verdict is {verdict.name!r}"
    if require == "uses_feedback":
        uses = figures.uses_feedback
        if uses is None:
            return "its rows have no feedback"
        low, high = uses.tuned.low, uses.tuned.high
        if low is None or low <= 0.5:
            ends = "" if low is None or high is None else f" [{low:.1%}, {high:.1%}]"
            return f"it uses feedback in {uses.tuned.mean:.1%} of rows{ends}; the whole interval must be above 50%"
    if require == NOT_WORSE and verdict.name == WORSE:
        return f"the verdict is {verdict.name!r}"
    if require == NOT_WORSE and verdict.costs_first_answers:
        return "it costs first answers"
    return None


def shown_shares(figures: MarginFigures) -> list[tuple[str, Compared]]:
    """Return the shares that card and page show, with what they are the shares of: rows in which …"""
    named = [
        ("its own feedback helps the right answer more than another row's feedback", figures.uses_feedback),
        ("the right answer is likelier than the wrong one, with its own feedback", figures.right_with_feedback),
        ("the right answer is likelier than the wrong one, to the question alone", figures.right_first),
        ("its own picture helps the right answer more than another row's picture", figures.sees),
    ]
    return [(name, compared) for name, compared in named if compared]


def _suffered(figures: MarginFigures) -> bool:
    """Return whether the answer with its own feedback is shown to be less often right, or where none is wrong, lost."""
    right = figures.right_with_feedback
    if right is not None and right.difference.low is not None:
        return right.difference.below_zero
    return figures.losses[OWN].difference.above_zero


def _missing(decides: Compared) -> str | None:
    """Return what a verdict needs and does not have, for people."""
    if decides.groups < FEWEST_GROUPS:
        return (
            f"{decides.groups} different pictures or questions, and {FEWEST_GROUPS} are needed: "
            f"{FEWEST_GROUPS - decides.groups} are missing"
        )
    if decides.different < FEWEST_DIFFERENT:
        return (
            f"the models differ in {decides.different} of {decides.rows:,} rows, and {FEWEST_DIFFERENT} such rows are "
            f"needed: {FEWEST_DIFFERENT - decides.different} are missing"
        )
    return None


def _sentences(name: str, costs: bool, figures: MarginFigures) -> list[str]:
    uses, right, first = figures.uses_feedback, figures.right_with_feedback, figures.right_first
    if uses is None:
        answers = figures.losses[QUESTION]
        begins = {
            LEARNED: "The tuned model predicts the answers better than its base.",
            WORSE: "The tuned model predicts the answers worse than its base.",
            NO_GAIN: "No difference between the tuned model and its base is shown.",
            TOO_FEW: f"Too few rows for a verdict: {_missing(answers)}.",
        }
        return [begins[name], f"Their loss changed by {_in_words(answers.difference)} nats per token."]
    begins = {
        LEARNED: "The tuned model learned to use feedback.",
        WORSE: "The tuned model uses feedback less than its base, and answers worse with it.",
        NO_GAIN: "It is not shown that the tuned model learned to use feedback.",
        TOO_FEW: f"Too few rows for a verdict: {_missing(uses)}.",
    }
    if name == NO_GAIN and uses.difference.above_zero:
        begins[NO_GAIN] = "The tuned model uses feedback more than its base, but answers worse with it."
    if name == NO_GAIN and uses.difference.below_zero:
        begins[NO_GAIN] = "The tuned model uses feedback less than its base, but does not answer worse with it."
    said = [
        begins[name],
        f"With another row's feedback as a control, its own makes the right answer likelier {_in_rows(uses)}.",
    ]
    if name in (NO_GAIN, TOO_FEW) and uses.base.mean >= NEAR_CEILING:
        said.append("The base already does so in nearly all rows, so hardly any gain can be shown.")
    if right is not None:
        said.append(f"With its own feedback the right answer is likelier than the wrong one {_in_rows(right)}.")
    else:
        change = _in_words(figures.losses[OWN].difference)
        said.append(f"The loss of the right answer with its own feedback changed by {change} nats per token.")
    if costs and first is not None:
        said.append(f"It costs first answers: without feedback, the right one is likelier {_in_rows(first)}.")
    return said


def _in_rows(share: Compared) -> str:
    change, base, tuned = share.difference, share.base.mean, share.tuned.mean
    ends = "" if change.low is None or change.high is None else f" [{100 * change.low:+.1f}, {100 * change.high:+.1f}]"
    return f"in {tuned:.1%} of rows, the base in {base:.1%}: {100 * change.mean:+.1f} points{ends}"
