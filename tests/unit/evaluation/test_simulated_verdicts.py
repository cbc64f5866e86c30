"""Intervals and verdicts on models whose behaviour is known, 2,000 times each: the table of docs/evaluation.md."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from simulated_evaluations import (
    BETTER,
    COVERED,
    HOLES,
    HUNDRED,
    HUNDRED_OF_SEVERAL,
    LEARNERS,
    NULLS,
    ONE_ROW_EACH,
    PERCENT,
    WORDS,
    Drawn,
    better,
    confused_without_w,
    declined,
    difference_covered,
    gains,
    learner_that_repeats,
    mean_covered,
    null,
    planted,
    repeats,
    share_covered,
    ten_points,
    wrong_first_answer_unlearned,
)
from vlmflow.evaluation.margins import Bounds, Groups, Values, difference_interval, mean_interval, share_interval
from vlmflow.evaluation.report import FEWEST_GROUPS, OWN, QUESTION
from vlmflow.evaluation.verdict import LEARNED, TOO_FEW, WORSE

pytestmark = pytest.mark.lengthy

LEAST = 93


@pytest.mark.parametrize(("kind", "rows_of"), COVERED)
def test_intervals_of_gains_hold_the_truth(kind: str, rows_of: Sequence[int]) -> None:
    """Percentiles of a bootstrap held it in 88 to 92 % where gains were skewed, or in one row of ten."""
    assert mean_covered(15, kind, rows_of) >= LEAST
    assert difference_covered(16, kind, rows_of) >= LEAST


@pytest.mark.parametrize("level", [2.0, 3.0])
def test_differences_near_the_ceiling_hold_the_truth(level: float) -> None:
    assert difference_covered(20, "normal", HUNDRED_OF_SEVERAL, level) >= LEAST


@pytest.mark.parametrize("percent", PERCENT)
@pytest.mark.parametrize("rows_of", [HUNDRED, HUNDRED_OF_SEVERAL])
def test_shares_near_their_ends_hold_the_truth(percent: float, rows_of: Sequence[int]) -> None:
    assert share_covered(17, percent, rows_of) >= LEAST


def test_heavy_tails_hold_the_truth_on_both_sides() -> None:
    """Without Student's interval each side misses it in 3.6 %."""
    drawn = Drawn(21, HUNDRED)
    found = mean_interval(drawn.random.standard_t(3, (100, 20_000)), Groups(drawn.groups))
    assert max(np.mean(found.low > 0), np.mean(found.high < 0)) < 0.03


def test_gains_and_losses_are_judged_alike() -> None:
    drawn = Drawn(22, HUNDRED)
    values = gains(drawn, "one in ten")[0]
    gained, lost = (mean_interval(sign * values, Groups(drawn.groups)) for sign in (1, -1))
    assert lost.low == pytest.approx(-gained.high)
    assert lost.high == pytest.approx(-gained.low)


EACH = pytest.mark.parametrize("interval", [mean_interval, share_interval, difference_interval])


@EACH
def test_rows_that_repeat_their_picture_add_nothing(interval: Callable[[Values, Groups], Bounds]) -> None:
    once = np.random.default_rng(1).integers(0, 2, 120).astype(float)
    names = [str(number) for number in range(120)]
    one, three = interval(once, Groups(names)), interval(np.tile(once, 3), Groups(names * 3))
    assert [three.mean, three.low, three.high] == pytest.approx([one.mean, one.low, one.high])


@EACH
def test_rows_and_columns_may_come_in_any_order(interval: Callable[[Values, Groups], Bounds]) -> None:
    random = np.random.default_rng(2)
    values = random.integers(0, 2, (300, 3)).astype(float)
    names = [str(number) for number in random.integers(0, 200, 300)]
    order = random.permutation(300)
    all_three = interval(values, Groups(names))
    one = interval(values[order, 1], Groups([names[place] for place in order]))
    assert [one.mean, one.low, one.high] == pytest.approx([all_three.mean[1], all_three.low[1], all_three.high[1]])


@EACH
def test_rows_that_are_each_others_control_count_as_alike(interval: Callable[[Values, Groups], Bounds]) -> None:
    """As if both had one picture; a link within a group adds nothing, and rows that differ are not taken for more."""
    once = np.random.default_rng(3).integers(0, 2, 200).astype(float)
    twice, names = np.tile(once, 2), [str(number) for number in range(400)]
    linked = interval(twice, Groups(names, [(number, number + 200) for number in range(200)]))
    of_one = interval(twice, Groups(names[:200] * 2))
    assert [linked.low, linked.high] == pytest.approx([of_one.low, of_one.high], abs=2e-3)
    alone = interval(once, Groups(names[:200]))
    assert (
        interval(once, Groups(["a", "a", *names[2:200]], [(0, 1)])).high
        == interval(once, Groups(["a", "a", *names[2:200]])).high
    )
    opposite = [
        (int(zero), int(one)) for zero, one in zip(np.flatnonzero(once == 0), np.flatnonzero(once), strict=False)
    ]
    assert interval(once, Groups(names[:200], opposite)).high == alone.high


@EACH
def test_few_groups_have_no_interval(interval: Callable[[Values, Groups], Bounds]) -> None:
    values = np.tile([0.0, 1.0], 300)
    few, enough = (interval(values, Groups([str(n % count) for n in range(600)])) for count in (99, FEWEST_GROUPS))
    assert few.mean == 0.5
    assert np.isnan([few.low, few.high]).all()
    assert enough.low < 0.5 < enough.high


def test_a_share_of_all_rows_is_not_known_for_certain() -> None:
    names = [str(number) for number in range(300)]
    found = share_interval(np.ones(300), Groups(names))
    assert (found.mean, found.high) == (1, 1)
    assert 0.98 < found.low < 0.99
    of_pictures = share_interval(np.ones(300), Groups([str(number // 3) for number in range(300)]))
    assert 0.94 < of_pictures.low < 0.97, "of rows that may all be alike only pictures count"


@pytest.mark.parametrize(
    ("up", "down", "shown"), [(4, 0, False), (5, 0, False), (8, 2, False), (9, 1, True), (0, 9, True)]
)
def test_few_rows_that_differ_are_judged_as_exactly_as_by_mcnemar(up: int, down: int, shown: bool) -> None:
    """McNemar's exact two-sided test gives 0.125, 0.063, 0.109, 0.021 and 0.004 here."""
    values = np.zeros(200)
    values[:up], values[up : up + down] = 1, -1
    found = difference_interval(values, Groups([str(number) for number in range(200)]))
    assert (found.low > 0 or found.high < 0) == shown


def test_values_that_are_all_equal_have_no_width() -> None:
    names = [str(number) for number in range(100)]
    for value in (0.0, -1.5):
        found = mean_interval(np.full(100, value), Groups(names))
        assert (found.mean, found.low, found.high) == (value, value, value)


@pytest.mark.filterwarnings("error")
@EACH
def test_one_row_has_a_mean(interval: Callable[[Values, Groups], Bounds]) -> None:
    found = interval(np.ones(1), Groups(["a"]))
    assert found.mean == 1
    assert np.isnan(found.low)


BY_CHANCE = 3.5
"""A 95 % interval is above zero by chance in 2.5 %; that of 2,000 draws may be 3.5 %."""


@pytest.mark.parametrize("name", NULLS)
def test_models_that_differ_by_noise_are_seldom_called_learned_or_worse(name: str) -> None:
    found = NULLS[name]()
    assert max(found[LEARNED], found[WORSE], found["costs"]) <= BY_CHANCE


@pytest.mark.parametrize("name", WORDS)
def test_words_of_the_feedback_in_right_and_wrong_answers_teach_nothing(name: str) -> None:
    """They are noise in its margins: it may be right less often."""
    assert WORDS[name]()[LEARNED] <= BY_CHANCE


@pytest.mark.parametrize(
    ("gain", "wrong_too"),
    [pytest.param(*each, marks=[] if each[0] in (0.1, 5.0) else [pytest.mark.slow]) for each in BETTER],
)
def test_a_model_that_is_better_in_everything_is_never_worse(gain: float, wrong_too: bool) -> None:
    """Differences of losses shrink as losses do, and called it worse in all draws."""
    found = better(11, gain, wrong_too)
    assert found[WORSE] == 0
    assert found["costs"] <= BY_CHANCE


@pytest.mark.parametrize(("share", "least"), [(50, 35), (70, 90), (85, 95)])
def test_ten_points_more_of_300_rows_are_found(share: int, least: int) -> None:
    """From 50 to 60 % the whole interval of *helps* is seldom above 55 %."""
    found = ten_points(12, share, OWN)
    assert found[LEARNED] >= least
    assert found[WORSE] == 0


@pytest.mark.parametrize("noise", [pytest.param(0.3, marks=pytest.mark.slow), 0.5])
@pytest.mark.parametrize("name", HOLES)
def test_who_did_not_learn_to_use_feedback_is_not_called_so(name: str, noise: float) -> None:
    assert planted(1, HOLES[name], noise=noise)[LEARNED] <= 1


@pytest.mark.parametrize("noise", [pytest.param(0.3, marks=pytest.mark.slow), 0.5])
@pytest.mark.parametrize("name", LEARNERS)
def test_who_learned_to_use_feedback_is_called_so(name: str, noise: float) -> None:
    assert planted(1, LEARNERS[name], noise=noise)[LEARNED] >= 85


def test_a_learner_that_still_repeats_its_wrong_attempt_is_not_found() -> None:
    """After its feedback it is not more often right than to the question alone."""
    assert planted(1, learner_that_repeats)[LEARNED] <= 5


def test_who_is_confused_and_learned_not_to_repeat_may_pass() -> None:
    """docs/evaluation.md says so."""
    assert 20 <= planted(1, confused_without_w)[LEARNED] <= 35


def test_who_repeats_its_wrong_attempt_is_worse_and_refused() -> None:
    found = planted(1, repeats)
    assert found[WORSE] == found["gated"] == 100


def test_equal_models_are_seldom_refused() -> None:
    assert null(27, ONE_ROW_EACH)["gated"] <= 6


def test_ten_points_less_of_first_answers_are_found() -> None:
    assert ten_points(13, 50, QUESTION, -10)["costs"] >= 80


def test_a_wrong_first_answer_may_get_less_likely() -> None:
    """Its loss rose, which was a decline."""
    found = wrong_first_answer_unlearned(23)
    assert found[LEARNED] >= 95
    assert found["costs"] == 0


def test_feedback_that_does_harm_is_worse() -> None:
    assert declined(14)[WORSE] >= 95


def test_a_picture_less_than_needed_gives_no_verdict() -> None:
    """However clear the rows are."""
    assert null(18, [3] * (FEWEST_GROUPS - 1), use=1) == {TOO_FEW: 100}


def test_rows_of_few_pictures_give_no_verdict_however_many_pictures_there_are() -> None:
    """One picture in 50 of 149 rows: learned by chance in 5 %, and in 34 % where it is in 300 of 399."""
    for many in (50, 300):
        assert null(26, [1] * (FEWEST_GROUPS - 1) + [many]) == {TOO_FEW: 100}


def test_models_that_hardly_differ_get_no_verdict() -> None:
    found = null(19, ONE_ROW_EACH, differ=0.001, use=1)
    assert found[TOO_FEW] > 90
    assert found[LEARNED] == found[WORSE] == 0
