"""The best trial of a search against the run's own settings: on models of known behaviour, and by simulation."""

from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import pytest
from msgspec import structs

from made_accounts import some_choice
from simulated_evaluations import Judge, choose_rows, ignores, rows, scorer, unlike, uses
from vlmflow.config.search_settings import Objective, SearchLimits
from vlmflow.core.errors import VlmflowError
from vlmflow.evaluation.margins import Groups, compare_losses, margin_figures
from vlmflow.evaluation.measure import evaluated_rows
from vlmflow.evaluation.report import QUESTION, MarginFigures
from vlmflow.rows.holdout import half_of
from vlmflow.search.best import Compare, against_own, decisive, is_better, refuse_too_few_to_recommend
from vlmflow.search.study import OWN, Judged, Study, StudyTrial

OBJECTIVES: list[Objective] = ["eval_loss", "uses_feedback"]


def trial(number: int, value: float) -> StudyTrial:
    return StudyTrial(
        number=number,
        round=0,
        rung=0,
        settings={"learning_rate": 10.0**-number},
        state="done",
        reason=None,
        steps=90,
        value=value,
        mem_mb=100,
        hours=1,
        gpu_hours=1,
        curve=[],
    )


def study(objective: Objective, *trials: StudyTrial) -> Study:
    return Study(
        search="s", objective=objective, last=(0, 0), trials=list(trials), empty=[], importances=None, digests={}
    )


def measured(own: Judge, best: Judge, count: int = 120, chose_nothing: bool = True, feedback: bool = True) -> Compare:
    """Return the comparison of two models of known behaviour."""

    def compare(first: StudyTrial, second: StudyTrial) -> tuple[MarginFigures, bool]:
        assert (first.number, second.number) == (0, 1)
        chosen, _ = choose_rows(rows(count), feedback=feedback)
        found, _ = evaluated_rows(chosen, scorer(unlike(own, 1)), scorer(unlike(best, 2)))
        return margin_figures(found), chose_nothing

    return compare


def never(first: StudyTrial, second: StudyTrial) -> tuple[MarginFigures, bool]:
    raise AssertionError("nothing is to be measured")


def judged(objective: Objective, compare: Compare, own: float = 0.5, best: float = 0.4, **of_own: object) -> Judged:
    """Judge a search of two trials, of which trial 1 has the better value by the validation loss."""
    sign = 1 if objective == "eval_loss" else -1
    both = structs.replace(trial(0, sign * own), **of_own), trial(1, sign * best)
    return against_own(study(objective, *both), "d", SearchLimits(hours=5), compare)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_trial_that_is_better_on_the_rows_that_judge_wins(objective: Objective) -> None:
    found = judged(objective, measured(ignores, uses, feedback=objective != "eval_loss"))
    assert (found.best, found.chosen, found.chose_nothing) == (1, 1, True)
    assert found.compared is not None
    assert found.compared.rows == 120
    assert found.sentence.startswith("Trial 1 beats the run's own settings (trial 0). On 120 rows of val that chose")
    assert "also chose" not in found.sentence
    assert found.probably == 1


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_trial_that_is_not_shown_to_be_better_loses_to_the_runs_own(objective: Objective) -> None:
    """It had the better value on the rows that chose; here it is worse."""
    found = judged(objective, measured(uses, lambda *row: ignores(*row) + 0.1))
    assert (found.best, found.chosen, found.probably) == (1, 0, 0)
    assert "is not shown to beat the run's own settings (trial 0): keep them." in found.sentence
    assert "Expect" not in found.sentence


@pytest.mark.parametrize(
    ("objective", "change", "values"),
    [
        (
            "eval_loss",
            "the loss of the answers by -0.0034 [-0.0108, +0.0040] nats per token",
            "validation loss 0.4, trial 0's 0.5",
        ),
        (
            "uses_feedback",
            "the share of rows in which feedback helps by +2.4 [-6.4, +11.1] points",
            "use of feedback -40.0%, trial 0's -50.0%",
        ),
    ],
)
def test_a_trial_whose_mean_alone_is_better_is_called_probably_better(
    objective: Objective, change: str, values: str
) -> None:
    found = judged(objective, measured(ignores, ignores))
    assert (found.best, found.chosen, found.probably) == (1, 0, 1)
    assert found.sentence == (
        "Trial 1 is probably better, not shown: best.yaml keeps the run's own settings (trial 0); probably.yaml has "
        "those of trial 1, and is used in the same way. On 120 rows of val that chose neither, trial 1 changes "
        f"{change}. Expect this change, not that of the half that chose trial 1 and so flatters it: {values}."
    )


def test_the_own_settings_with_the_best_value_are_kept_and_nothing_is_measured() -> None:
    found = judged("eval_loss", never, own=0.3)
    assert (found.best, found.chosen, found.probably, found.compared) == (0, 0, 0, None)
    assert found.sentence == "No trial has a better validation loss than the run's own settings (trial 0): keep them."


@pytest.mark.parametrize(
    ("own", "why"),
    [
        ({"state": "failed", "value": None}, "failed"),
        ({"state": "stopped", "value": 0.1}, "stopped: its hours were over"),
        ({"hours": 9}, "above a limit"),
    ],
)
def test_own_settings_without_a_result_are_said_to_have_none(own: dict[str, object], why: str) -> None:
    found = judged("eval_loss", never, **own)
    assert (found.best, found.chosen, found.probably) == (1, 1, 1)
    assert found.sentence.endswith(f"trial 0, which has them, gave no result ({why}).")


def test_without_a_result_nothing_is_chosen() -> None:
    found = against_own(
        study("eval_loss", structs.replace(trial(0, 1), value=None, state="failed")), "d", SearchLimits(), never
    )
    assert (found.best, found.chosen, found.probably, found.compared) == (None, None, None, None)


def test_too_few_rows_keep_the_own_settings_and_say_how_many_are_missing() -> None:
    found = judged("uses_feedback", measured(ignores, uses, count=80, chose_nothing=False))
    assert (found.chosen, found.probably) == (0, 1)
    assert "80 different pictures or questions, and 100 are needed: 20 are missing" in found.sentence
    assert found.sentence.endswith(
        "Val also chose these trials and their checkpoints, which flatters trial 1: it has too few pictures to be "
        "halved."
    )
    assert "Expect" not in found.sentence


def test_few_rows_that_differ_show_no_winner() -> None:
    """Four rows that all change one way may be chance: here nine do, of 120."""

    def all_but_nine(feedback: str, answer: str, number: int) -> float:
        loss = uses(feedback, answer, number)
        return 4 - loss if number < 9 else loss

    found = judged("uses_feedback", measured(all_but_nine, uses))
    assert found.compared is not None
    assert found.compared.different == 9
    assert found.compared.difference.above_zero
    assert (found.chosen, found.probably) == (0, 1)
    assert "such rows are needed" in found.sentence


def test_data_without_feedback_are_compared_by_the_loss_of_their_answers() -> None:
    found = judged("eval_loss", measured(lambda *_: 2.0, lambda *_: 1.0, feedback=False))
    assert found.chosen == 1
    with pytest.raises(VlmflowError, match="no feedback, which uses_feedback compares"):
        judged("uses_feedback", measured(ignores, uses, feedback=False))


TRIALS, DRAWS = 20, 2000


def wins(which: Callable[[frozenset[str], list[str]], frozenset[str]]) -> float:
    """Return the per cent of draws in which the best of equal trials is said to beat one more, which is as good.

    which: takes the rows that chose, and all; returns those that judge. 200 rows of as many pictures; the losses of
    trials differ by noise. The trial with the lowest mean on the rows that choose is compared.
    """
    random = np.random.default_rng(31)
    groups = [f"{number:016x}" for number in range(200)]
    choosing = half_of(groups, "chooses")
    assert choosing is not None
    judging = which(choosing, groups)
    chooses, judges = (np.array([group in some for group in groups]) for some in (choosing, judging))
    noise = random.normal(size=(DRAWS, TRIALS + 1, len(groups))).astype(np.float32)
    best = noise[:, 1:, chooses].mean(axis=2).argmin(axis=1) + 1
    base, tuned = noise[:, 0, judges].T.astype(float), noise[np.arange(DRAWS), best][:, judges].T.astype(float)
    found = compare_losses(base, tuned, Groups([group for group in groups if group in judging]))
    return 100 * sum(is_better("eval_loss", each) for each in found) / DRAWS


def test_the_best_of_equal_trials_wins_by_chance_only_on_rows_that_chose() -> None:
    on_the_other_half = wins(lambda choosing, groups: half_of(groups, "judges") or frozenset())
    on_the_same_rows = wins(lambda choosing, groups: choosing)
    assert on_the_other_half <= 3.5
    assert on_the_same_rows > 15


def gains(spread: float, behind: float = 0) -> dict[str, float]:
    """Return what users of a search of 13 trials get, in nats per token less than with their own settings, on average.

    best: in truth, from the trial with the best value. chosen, probably: from the settings of best.yaml and
    probably.yaml. won: the per cent of draws in which best.yaml has other settings than the run's own. said, got: where
    probably.yaml alone has such settings, the change that its comment says to expect, and what they give. flattered: by
    how much the value of the best trial is too good.

    spread: the standard deviation of the true losses of trials. behind: by how much the run's own settings are better
    than an average trial. The half that chose and the half that judges have 150 rows each, of as many pictures.
    """
    random, rows_of_half, noise = np.random.default_rng(32), 150, 0.3
    groups = Groups([f"{number:016x}" for number in range(rows_of_half)])
    truth = spread * random.normal(size=(DRAWS, 13))
    truth[:, OWN] = -behind
    values = truth + noise / np.sqrt(rows_of_half) * random.normal(size=truth.shape)
    best = values.argmin(axis=1)
    base, tuned = (
        true + noise * random.normal(size=(rows_of_half, DRAWS)) for true in (truth[:, OWN], truth[range(DRAWS), best])
    )
    found: dict[str, list[float]] = {name: [] for name in ("best", "chosen", "probably", "won", "said", "got")}
    for true, of_trials, each in zip(truth, values, compare_losses(base, tuned, groups), strict=True):
        figures = MarginFigures(rows_of_half, rows_of_half, None, None, None, None, {QUESTION: each})
        trials = [trial(number, value) for number, value in enumerate(of_trials)]
        outcome = against_own(study("eval_loss", *trials), "d", SearchLimits(), lambda *_, of=figures: (of, True))
        for name in ("best", "chosen", "probably"):
            found[name].append(true[OWN] - true[getattr(outcome, name)])
        found["won"].append(100 * (outcome.chosen != OWN))
        if outcome.chosen != outcome.probably:
            found["said"].append(-each.difference.mean)
            found["got"].append(found["probably"][-1])
    flattered = np.mean(truth[range(DRAWS), best] - values.min(axis=1))
    return {name: float(np.mean(each)) for name, each in found.items()} | {"flattered": float(flattered)}


@pytest.mark.parametrize(
    ("spread", "best", "won", "chosen", "probably", "flattered"),
    [
        (0.0, 0.0, 2, 0.0, 0.0, 0.042),
        (0.02, 0.020, 10, 0.004, 0.016, 0.033),
        (0.05, 0.072, 52, 0.046, 0.070, 0.019),
        (0.1, 0.157, 90, 0.149, 0.156, 0.010),
    ],
)
def test_what_users_of_a_search_get(
    spread: float, best: float, won: int, chosen: float, probably: float, flattered: float
) -> None:
    """docs/search.md has these figures."""
    found = gains(spread)
    nats = [found[name] for name in ("best", "chosen", "probably", "flattered")]
    assert nats == pytest.approx([best, chosen, probably, flattered], abs=0.001)
    assert found["won"] == pytest.approx(won, abs=1)


def test_settings_that_are_probably_better_cost_little_where_the_own_ones_are_the_best() -> None:
    """docs/search.md has these figures."""
    found = gains(0.02, behind=0.05)
    assert [found["chosen"], found["probably"]] == pytest.approx([0, -0.002], abs=0.001)
    hardly = gains(0.02)
    assert [hardly["said"], hardly["got"]] == pytest.approx([0.031, 0.022], abs=0.001)


def test_the_figures_that_decide_are_those_of_the_objective() -> None:
    figures, _ = measured(ignores, uses)(trial(0, 1), trial(1, 1))
    assert decisive("uses_feedback", figures) == figures.uses_feedback
    figures, _ = measured(ignores, uses, feedback=False)(trial(0, 1), trial(1, 1))
    assert decisive("eval_loss", figures) == figures.losses["question"]


@pytest.mark.parametrize(
    ("objective", "groups", "all_groups", "said"),
    [
        ("uses_feedback", 99, 200, "use of feedback have 99 different pictures or questions, and 100 are needed"),
        ("uses_feedback", 100, 200, None),
        ("eval_loss", 0, 100, None),
        ("eval_loss", 0, 99, "validation loss have 99 different"),
    ],
)
def test_a_search_that_could_never_recommend_is_refused(
    objective: Objective, groups: int, all_groups: int, said: str | None
) -> None:
    choice = some_choice(groups=groups, all_groups=all_groups)
    with pytest.raises(VlmflowError, match=said) if said else nullcontext():
        refuse_too_few_to_recommend("s", choice, objective)
