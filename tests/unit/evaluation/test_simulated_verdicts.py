"""Verdicts on models whose behaviour is known, 2,000 times each: the table of docs/evaluation.md."""

import pytest

from simulated_evaluations import (
    BETTER,
    NULLS,
    ONE_ROW_EACH,
    WORDS,
    better,
    declined,
    null,
    ten_points,
    wrong_first_answer_unlearned,
)
from vlmflow.evaluation.report import FEWEST_GROUPS, OWN, QUESTION
from vlmflow.evaluation.verdict import LEARNED, TOO_FEW, WORSE

pytestmark = pytest.mark.lengthy

BY_CHANCE = 3.5
"""A 95 % interval is above zero by chance in 2.5 %; that of 2,000 draws may be 3.5 %."""


@pytest.mark.parametrize("name", NULLS)
def test_models_that_differ_by_noise_are_seldom_called_learned_or_worse(name: str) -> None:
    found = NULLS[name]()
    assert max(found[LEARNED], found[WORSE], found["costs"]) <= BY_CHANCE


@pytest.mark.parametrize("name", WORDS)
def test_words_of_the_feedback_in_right_and_wrong_answers_teach_nothing(name: str) -> None:
    found = WORDS[name]()
    assert max(found[LEARNED], found[WORSE]) <= BY_CHANCE


@pytest.mark.parametrize(
    ("gain", "wrong_too"),
    [pytest.param(*each, marks=[] if each[0] in (0.1, 5.0) else [pytest.mark.slow]) for each in BETTER],
)
def test_a_model_that_is_better_in_everything_is_never_worse(gain: float, wrong_too: bool) -> None:
    """Differences of losses shrink as losses do, and called it worse in all draws."""
    found = better(11, gain, wrong_too)
    assert found[WORSE] == 0
    assert found["costs"] <= BY_CHANCE


@pytest.mark.parametrize("share", [50, 70, 85])
def test_ten_points_more_of_300_rows_are_found(share: int) -> None:
    found = ten_points(12, share, OWN)
    assert found[LEARNED] >= 80
    assert found[WORSE] == 0


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
