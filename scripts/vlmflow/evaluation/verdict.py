"""What one row adds to the shares of an evaluation.

Pages and trackers read it, whose environment has no scipy: so it is not in `evaluation.margins`.

What an evaluation shows: a verdict from shares of rows with their intervals, and whether a run may be published.

A share rose or fell if the 95 % interval of tuned minus base is above or below zero.

Finished evaluations: reads them for the card, and decides whether weights may be published.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from vlmflow.config.after_training import ChosenBy, Requirements, each_requirement
from vlmflow.core.account import read_account
from vlmflow.core.errors import VlmflowError, counted
from vlmflow.evaluation.report import (
    FEWEST_GROUPS,
    NEUTRAL,
    OTHER_PICTURE,
    OTHERS,
    OWN,
    QUESTION,
    AlsoChose,
    Choice,
    Compared,
    Condition,
    EvaluationReport,
    Interval,
    Margin,
    MarginFigures,
    MarginReport,
    OneAnswer,
    Share,
    State,
    left_out_in_words,
)
from vlmflow.merging.proof import Proof, proven_digest
from vlmflow.supervisor.report import TrainingReport

Values = NDArray[np.float64]


EQUAL = 1e-4
"""Losses, in nats per token, that differ by no more are equal: float32 adds up to as much in another order."""

SAME = 0.025
"""Preferences that differ by less are equal: 19 against 20 nats is no difference for who reads the answer."""


def preferred(value: Values, other: Values | float, equal: float = 0.0) -> Values:
    """Return 1 where one is above the other, 0 where it is below, and one half where they are equal: a tie.

    equal: so far they may differ.
    """
    difference = value - other
    return (np.sign(difference) * (np.abs(difference) > equal) + 1) / 2


def row_shares(margins: Mapping[str, Margin]) -> dict[str, float]:
    """Return what a row adds to each share that it can tell (`MarginFigures`): 1, 0, or one half for a tie.

    *uses feedback* is the average over the row's donors.

    margins: those of one model, by context.
    """
    one_answer = any(margin.wrong is None for margin in margins.values())
    values = {context: np.array(margin.value) for context, margin in margins.items()}
    preferences = {context: np.array(margin.preference) for context, margin in margins.items()}
    shares: dict[str, Values | np.floating[Any]] = {}
    if not one_answer:
        above = {"right_first": QUESTION, "right_with_feedback": OWN}
        shares |= {name: preferred(values[context], 0.0) for name, context in above.items() if context in values}
    if others := [values[context] for context in OTHERS if context in values]:
        shares["uses_feedback"] = np.mean([preferred(values[OWN], other) for other in others])
    if OWN in values:
        controls = {"adds": NEUTRAL, "helps": QUESTION}
        shares |= {
            name: preferred(preferences[OWN], preferences[context], SAME)
            for name, context in controls.items()
            if context in values
        }
    if OTHER_PICTURE in values:
        shares["sees"] = preferred(values[OWN if OWN in values else QUESTION], values[OTHER_PICTURE])
    return {name: float(share) for name, share in shares.items()}


LEARNED, WORSE, NO_GAIN, TOO_FEW = "learned", "worse", "no gain shown", "too few rows"
TOO_FEW_WITHOUT_ECHO = "too few rows without echo"

FEWEST_DIFFERENT = 10
"""With fewer rows in which the models differ nothing is shown: four that all change one way may be chance."""

NEAR_CEILING = 0.9
"""A base that uses feedback in this share of rows leaves little to gain."""

ABOVE = {"uses_feedback": 0.5, "adds": 0.5, "helps": 0.55}
"""What a share of the tuned model must be above, by its whole interval. Feedback that says what the question says, too,
raises *helps* to a little above one half."""

CONDITIONS = {
    "uses_feedback": "a row's own feedback helps more than another row's, and more often than in the base",
    "adds": "it helps more than neutral feedback, and more often than in the base",
    "helps": "after it the right answer is likelier than to the question alone, and more often than in the base",
    "own": "with it the right answer is likelier than in the base",
}
"""The conditions of LEARNED, by name, for people."""


class Verdict(msgspec.Struct, frozen=True):
    """What margins show.

    name: LEARNED, WORSE, NO_GAIN, TOO_FEW or TOO_FEW_WITHOUT_ECHO. costs_first_answers: whether the tuned model is
    shown to prefer the right answer less often than its base before any feedback. sentence: all of it for people.
    conditions: those of LEARNED, by name; none without feedback.
    """

    name: str
    costs_first_answers: bool
    sentence: str
    conditions: dict[str, Condition] = {}


def judge(figures: MarginReport) -> Verdict:
    """Return the verdict on rows (docs/evaluation.md).

    A figure rose or fell if the interval of tuned minus base is above or below 0. learned: each share of ABOVE rose,
    and is above its bound; in more than half of the rows the own feedback helps more than it helps the base; and all of
    it also in the rows without echo. worse: with its own feedback the right answer is less often likelier than the
    wrong one; in rows with one answer, its loss rose in most, and its mean did not fall. Without feedback the loss of
    the answers alone decides.
    """
    every, without_echo = figures.all, figures.without_any_echo
    uses, lost = every.uses_feedback, every.one_answer
    decides = uses or (lost and lost.fell)
    assert decides, "a row without feedback has no wrong answer"
    conditions = {}
    if uses:
        conditions = {
            name: Condition(*(state_of(name, some) if some else "open" for some in (every, without_echo)))
            for name in CONDITIONS
        }
    if _is_worse(every):
        name = WORSE
    elif missing(decides):
        name = TOO_FEW
    elif uses and (without_echo is None or too_few_groups(without_echo.groups)):
        name = TOO_FEW_WITHOUT_ECHO
    elif uses:
        name = LEARNED if all({each.all, each.without_echo} == {"met"} for each in conditions.values()) else NO_GAIN
    else:
        name = LEARNED if lost and _mostly(lost.fell, _above) and not lost.loss.difference.above_zero else NO_GAIN
    first = every.right_first
    costs = first is not None and _fell(first)
    return Verdict(name, costs, " ".join(_sentences(name, costs, figures, conditions)), conditions)


def state_of(name: str, figures: MarginFigures) -> State:
    """Return whether rows meet a condition of LEARNED by whole intervals, refute it, or leave it open.

    name: a key of CONDITIONS.
    """
    compared = figures.own if name == "own" else getattr(figures, name)
    if compared is None or missing(compared):
        return "open"
    if isinstance(compared, Share):
        shares = [(compared.share, 0.5)]
    else:
        shares = [(compared.tuned, ABOVE[name]), (compared.difference, 0.0)]
    if all(_above(share, bound) for share, bound in shares):
        return "met"
    return "refuted" if any(_below(share, bound) for share, bound in shares) else "open"


def falls_short(require: Requirements, verdict: Verdict, figures: MarginFigures) -> str | None:
    """Return why a run does not fulfil `runs.NAME.evaluate.require`, for people; None if it does.

    learned: the verdict. uses_feedback: the tuned model's *uses feedback* is above one half by its interval. not_worse:
    the verdict is not worse, and the training is not shown to cost first answers; of a measure: it did not fall.
    """
    for measure, word in each_requirement(require):
        if reason := _falls_short(measure, word, verdict, figures):
            return f"{f'{measure}: ' if measure else ''}{word}, but {reason}"
    return None


def _falls_short(measure: str | None, require: str, verdict: Verdict, figures: MarginFigures) -> str | None:
    if measure:
        share = figures.shares.get(measure)
        return "no row can tell it" if share is None else f"it fell: {_in_rows(share)}" if _fell(share) else None
    if require == "learned" and verdict.name != LEARNED:
        return f"the verdict is {verdict.name!r}"
    if require == "uses_feedback":
        uses = figures.uses_feedback
        if uses is None:
            return "its rows have no feedback"
        if uses.tuned.low is None or uses.tuned.low <= 0.5:
            ends = uses.tuned.ends("{:.1%}".format)
            return f"it uses feedback in {uses.tuned.mean:.1%} of rows{ends}; the whole interval must be above 50%"
    if require == "not_worse" and verdict.name == WORSE:
        return f"the verdict is {verdict.name!r}"
    if require == "not_worse" and verdict.costs_first_answers:
        return "it costs first answers"
    return None


def refuse_too_few(choice: Choice, require: Requirements) -> None:
    """Refuse rows on which no evaluation can show what is required. require: runs.NAME.evaluate.require.

    Raises VlmflowError with how many are missing.
    """
    for measure, word in each_requirement(require):
        echo = " without echo" if choice.feedback and word == "learned" else ""
        few = too_few_groups(choice.groups_without_echo if echo else choice.groups)
        if few and not measure and word != "not_worse":
            raise VlmflowError(
                f"runs.{choice.run}.evaluate.require: {word} cannot be shown on {choice.split} of data set "
                f"{choice.dataset}: its rows{echo} that can judge have {few}; left out are "
                f"{left_out_in_words(choice.left_out)}",
                f"take more rows into val (val_share of datasets.{choice.dataset}), or remove the word from require",
            )


def shown_shares(figures: MarginFigures) -> list[tuple[str, Compared]]:
    """Return the shares that card and page show, with what they are the shares of: rows in which …"""
    named = [
        ("its own feedback helps the right answer more than another row's feedback", figures.uses_feedback),
        ("its own feedback helps the right answer more than neutral feedback", figures.adds),
        ("the right answer is likelier after its own feedback than to the question alone", figures.helps),
        ("the right answer is likelier than the wrong one, with its own feedback", figures.right_with_feedback),
        ("the right answer is likelier than the wrong one, to the question alone", figures.right_first),
        ("its own picture helps the right answer more than another row's picture", figures.sees),
    ]
    return [(name, compared) for name, compared in named if compared]


def _is_worse(figures: MarginFigures) -> bool:
    """Return whether rows show a decline. Rows with a wrong answer decide, if they have an interval."""
    right, lost = figures.right_with_feedback, figures.one_answer
    if right is not None and right.difference.low is not None:
        return _fell(right)
    return lost is not None and _mostly(lost.fell, _below) and not lost.loss.difference.below_zero


def _fell(share: Compared) -> bool:
    return share.difference.below_zero and not missing(share)


def _above(interval: Interval, bound: float) -> bool:
    return interval.low is not None and interval.low > bound


def _below(interval: Interval, bound: float) -> bool:
    return interval.high is not None and interval.high < bound


def _mostly(share: Share, side: Callable[[Interval, float], bool]) -> bool:
    """Return whether a share is above, or below, one half by its whole interval. side: `_above` or `_below`."""
    return side(share.share, 0.5) and not missing(share)


def too_few_groups(groups: int) -> str | None:
    """Return how many pictures or questions are missing, for people; None if there are enough of them."""
    if groups >= FEWEST_GROUPS:
        return None
    lacking = FEWEST_GROUPS - groups
    return f"{groups} different pictures or questions, and {FEWEST_GROUPS} are needed: {lacking} are missing"


def missing(decides: Compared | Share) -> str | None:
    """Return what a verdict needs and does not have, for people; None if it has enough."""
    interval = decides.share if isinstance(decides, Share) else decides.difference
    if few := too_few_groups(decides.groups):
        return few
    if interval.low is None:
        return "most rows have one of few pictures or questions, and so say little: more different ones are missing"
    if decides.different < FEWEST_DIFFERENT:
        return (
            f"the models differ in {decides.different} of {decides.rows:,} rows, and {FEWEST_DIFFERENT} such rows are "
            f"needed: {FEWEST_DIFFERENT - decides.different} are missing"
        )
    return None


def _sentences(name: str, costs: bool, figures: MarginReport, conditions: Mapping[str, Condition]) -> list[str]:
    every, first = figures.all, figures.all.right_first
    lost = every.one_answer
    sentences = _of_losses(name, lost) if lost and not conditions else _of_feedback(name, figures, conditions)
    if costs and first is not None:
        sentences.append(f"It costs first answers: without feedback, the right one is likelier {_in_rows(first)}.")
    return sentences


def _of_losses(name: str, lost: OneAnswer) -> list[str]:
    begins = {
        LEARNED: "The tuned model predicts the answers better than its base.",
        WORSE: "The tuned model predicts the answers worse than its base.",
        NO_GAIN: "No difference between the tuned model and its base is shown.",
        TOO_FEW: f"Too few rows for a verdict: {missing(lost.fell)}.",
    }
    if name == NO_GAIN and _mostly(lost.fell, _above):
        begins[NO_GAIN] = "No gain is shown: most rows got better, and a few rows lost much."
    share = lost.fell.share
    return [
        begins[name],
        f"The loss of the answers changed by {_in_words(lost.loss.difference)} nats per token; less is better.",
        f"It fell in {share.mean:.1%} of rows{share.ends('{:.1%}'.format)}.",
    ]


def _of_feedback(name: str, figures: MarginReport, conditions: Mapping[str, Condition]) -> list[str]:
    every, without_echo = figures.all, figures.without_any_echo
    uses, right = every.uses_feedback, every.right_with_feedback
    assert uses is not None, "it is what tells data with feedback"
    shown = [each for each, state in conditions.items() if {state.all, state.without_echo} != {"met"}]
    not_shown = "; nor that ".join(CONDITIONS[each] for each in shown)
    begins = {
        LEARNED: "The tuned model learned to use feedback.",
        WORSE: "The tuned model answers worse after feedback than its base.",
        NO_GAIN: f"It is not shown that the tuned model learned to use feedback: not that {not_shown}.",
        TOO_FEW: f"Too few rows for a verdict: {missing(uses)}.",
        TOO_FEW_WITHOUT_ECHO: (
            "Too few rows without echo for a verdict: in the others the right answer repeats a word of its feedback. "
            f"Without them, there are {too_few_groups(without_echo.groups if without_echo else 0)}."
        ),
    }
    if shown == ["helps"] and name == NO_GAIN:
        begins[NO_GAIN] = (
            "It is not shown that the tuned model learned to use feedback: it tells its own feedback from other "
            "feedback, but after it it is not shown to be more often right than to the question alone."
        )
    sentences = [begins[name]]
    own = "makes the right answer likelier" if right is None else "favours the right answer over the wrong one"
    sentences.append(f"With another row's feedback as a control, its own {own} {_in_rows(uses)}.")
    if every.adds:
        sentences.append(f"With neutral feedback as a control, {_in_rows(every.adds)}.")
    if every.helps:
        sentences.append(f"With the question alone as a control, {_in_rows(every.helps)}.")
    if name in (NO_GAIN, TOO_FEW) and uses.base.mean >= NEAR_CEILING:
        sentences.append("The base already tells its own feedback in nearly all rows: hardly any gain can be shown.")
    if figures.with_gold and figures.without_gold and figures.without_gold.uses_feedback and name == LEARNED:
        known, of = figures.with_gold.rows, figures.without_gold.uses_feedback
        sentences.append(f"Without the {counted(known, 'row')} whose feedback has the right answer: {_in_rows(of)}.")
    if right is not None:
        sentences.append(f"With its own feedback the right answer is likelier than the wrong one {_in_rows(right)}.")
    elif every.one_answer:
        change = _in_words(every.one_answer.loss.difference)
        sentences.append(f"The loss of the right answer with its own feedback changed by {change} nats per token.")
    return sentences


def _in_rows(share: Compared) -> str:
    change, base, tuned = share.difference, share.base.mean, share.tuned.mean
    ends = change.ends(lambda end: f"{100 * end:+.1f}")
    chance = ", which may be chance" if ends and not (change.below_zero or change.above_zero) else ""
    return f"in {tuned:.1%} of rows, the base in {base:.1%}: {100 * change.mean:+.1f} points{ends}{chance}"


def _in_words(interval: Interval) -> str:
    return f"{interval.mean:+.3f}{interval.ends('{:+.3f}'.format)}"


REPORT = "report.json"
"""The report in a folder eval/RUN/SPLIT."""


def also_chose(full: Path, chosen_by: ChosenBy | None) -> AlsoChose:
    """Return by what all rows of val chose a model. full: its training (checkpoints/RUN/full). chosen_by: the run's.

    A search that kept the run's own settings, which is its trial 0, chose none.
    """
    trained = read_account(full / "report.json", TrainingReport)
    return AlsoChose(len(trained.eval_losses), chosen_by.trials if chosen_by and chosen_by.trial else 1)


def with_how_val_was_used(verdict: Verdict, chose: AlsoChose | None, left_out: Mapping[str, int]) -> str:
    """Return a verdict's sentence with what val was used for besides, if that matters.

    chose: what all of its rows also chose; None if they did not. left_out: how many rows are out, by reason.
    """
    others = left_out.get("other_half", 0)
    if chose:
        return f"{verdict.sentence} {chose.in_words}"
    if verdict.name in (TOO_FEW, TOO_FEW_WITHOUT_ECHO) and others:
        return f"{verdict.sentence} Val's other {others:,} rows chose the checkpoint, so they cannot judge it."
    return verdict.sentence


def read_evaluations(folders: Sequence[Path], proof: Proof) -> dict[str, EvaluationReport]:
    """Return the reports of a run's evaluations by split.

    folders: eval/RUN/SPLIT. proof: that of the weights to publish.

    Raises VlmflowError if an evaluation is of other weights.
    """
    reports = {}
    for folder in folders:
        report = read_account(folder / REPORT, EvaluationReport)
        if report.tuned.digest != proven_digest(proof):
            raise VlmflowError(
                f"{folder}: it evaluated other weights than those in verified/{report.run}",
                f"remove {folder} and run the same command again",
            )
        reports[report.split] = report
    return reports


def refuse_unless_shown(evaluations: Mapping[str, EvaluationReport], require: Requirements) -> None:
    """Refuse weights whose evaluation on val falls short. require: runs.NAME.evaluate.require; None accepts all.

    Raises VlmflowError with the reason, and the figures on which it rests.
    """
    if require is None:
        return
    val = evaluations["val"]
    if reason := falls_short(require, Verdict(val.verdict, val.costs_first_answers, val.sentence), val.figures.all):
        raise VlmflowError(
            f"eval/{val.run}/val: runs.NAME.evaluate.require: {reason}. {val.sentence}",
            f"look at reports/eval-{val.run}.html; take more rows (few show nothing), train with other settings, or "
            f"remove runs.NAME.evaluate.require. The weights stay in verified/{val.run}",
        )
