"""What one row adds to the shares of an evaluation.

Pages and trackers read it, whose environment has no scipy: so it is not in `evaluation.margins`.

What an evaluation shows: a verdict from shares of rows with their intervals, and whether a run may be published.

A share rose or fell if the 95 % interval of tuned minus base is above or below zero.

Finished evaluations: reads them for the card, and decides whether weights may be published.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from vlmflow.config.after_training import ChosenBy
from vlmflow.core.account import read_account
from vlmflow.core.errors import VlmflowError
from vlmflow.evaluation.report import (
    FEWEST_GROUPS,
    OTHER,
    OTHER_PICTURE,
    OWN,
    QUESTION,
    AlsoChose,
    Compared,
    EvaluationReport,
    Interval,
    Margin,
    MarginFigures,
)
from vlmflow.merging.proof import Proof, proven_digest
from vlmflow.supervisor.report import TrainingReport

Values = NDArray[np.float64]


def preferred(value: Values, other: Values | float) -> Values:
    """Return 1 where one is above the other, 0 where it is below, and one half where they are equal: a tie."""
    return (np.sign(value - other) + 1) / 2


def row_shares(margins: Mapping[str, Margin]) -> dict[str, float]:
    """Return what a row adds to each share that it can tell (`MarginFigures`): 1, 0, or one half for a tie.

    margins: those of one model, by context.
    """
    values = {context: np.array(margin.value) for context, margin in margins.items()}
    one_answer = any(margin.wrong is None for margin in margins.values())
    sides: dict[str, tuple[str, str | None]] = {
        "right_first": (QUESTION, None),
        "right_with_feedback": (OWN, None),
        "uses_feedback": (OWN, OTHER),
        "sees": (OWN if OWN in margins else QUESTION, OTHER_PICTURE),
    }
    shares = {}
    for name, (context, other) in sides.items():
        if context in values and (other in values if other else not one_answer):
            shares[name] = float(preferred(values[context], values[other] if other else 0.0))
    return shares


LEARNED, WORSE, NO_GAIN, TOO_FEW = "learned", "worse", "no gain shown", "too few rows"

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
    if missing(uses or figures.losses[QUESTION]):
        name = TOO_FEW
    elif uses and change.above_zero and not _suffered(figures):
        name = LEARNED
    elif uses:
        name = WORSE if change.below_zero and _suffered(figures) else NO_GAIN
    else:
        name = LEARNED if change.below_zero else WORSE if change.above_zero else NO_GAIN
    costs = first is not None and _fell(first)
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
        if uses.tuned.low is None or uses.tuned.low <= 0.5:
            ends = uses.tuned.ends("{:.1%}".format)
            return f"it uses feedback in {uses.tuned.mean:.1%} of rows{ends}; the whole interval must be above 50%"
    if require == "not_worse" and verdict.name == WORSE:
        return f"the verdict is {verdict.name!r}"
    if require == "not_worse" and verdict.costs_first_answers:
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
        return _fell(right)
    return figures.losses[OWN].difference.above_zero


def _fell(share: Compared) -> bool:
    return share.difference.below_zero and not missing(share)


def missing(decides: Compared) -> str | None:
    """Return what a verdict needs and does not have, for people; None if it has enough."""
    if decides.groups < FEWEST_GROUPS:
        return (
            f"{decides.groups} different pictures or questions, and {FEWEST_GROUPS} are needed: "
            f"{FEWEST_GROUPS - decides.groups} are missing"
        )
    if decides.difference.low is None:
        return "most rows have one of few pictures or questions, and so say little: more different ones are missing"
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
            TOO_FEW: f"Too few rows for a verdict: {missing(answers)}.",
        }
        change = _in_words(answers.difference)
        return [begins[name], f"The loss of the answers changed by {change} nats per token; less is better."]
    begins = {
        LEARNED: "The tuned model learned to use feedback.",
        WORSE: "The tuned model uses feedback less than its base, and answers worse with it.",
        NO_GAIN: "It is not shown that the tuned model learned to use feedback.",
        TOO_FEW: f"Too few rows for a verdict: {missing(uses)}.",
    }
    if name == NO_GAIN and uses.difference.above_zero:
        begins[NO_GAIN] = "The tuned model uses feedback more than its base, but answers worse with it."
    if name == NO_GAIN and uses.difference.below_zero:
        begins[NO_GAIN] = "The tuned model uses feedback less than its base, but does not answer worse with it."
    helps = "makes the right answer likelier" if right is None else "favours the right answer over the wrong one"
    sentences = [begins[name], f"With another row's feedback as a control, its own {helps} {_in_rows(uses)}."]
    if name in (NO_GAIN, TOO_FEW) and uses.base.mean >= NEAR_CEILING:
        sentences.append("The base already does so in nearly all rows, so hardly any gain can be shown.")
    if right is not None:
        sentences.append(f"With its own feedback the right answer is likelier than the wrong one {_in_rows(right)}.")
    else:
        change = _in_words(figures.losses[OWN].difference)
        sentences.append(f"The loss of the right answer with its own feedback changed by {change} nats per token.")
    if costs and first is not None:
        sentences.append(f"It costs first answers: without feedback, the right one is likelier {_in_rows(first)}.")
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
    if verdict.name == TOO_FEW and others:
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


def refuse_unless_shown(evaluations: Mapping[str, EvaluationReport], require: str | None) -> None:
    """Refuse weights whose evaluation on val falls short. require: runs.NAME.evaluate.require; None accepts all.

    Raises VlmflowError with the reason, and the figures on which it rests.
    """
    if require is None:
        return
    val = evaluations.get("val")
    if val is None:
        raise VlmflowError(
            f"runs.NAME.evaluate.require: {require} is judged on val, which was not evaluated",
            "add val to runs.NAME.evaluate.splits",
        )
    if reason := falls_short(require, Verdict(val.verdict, val.costs_first_answers, val.sentence), val.figures.all):
        raise VlmflowError(
            f"eval/{val.run}/val: runs.NAME.evaluate.require: {require}, but {reason}. {val.sentence}",
            f"look at reports/eval-{val.run}.html; take more rows (few show nothing), train with other settings, or "
            f"remove runs.NAME.evaluate.require. The weights stay in verified/{val.run}",
        )
