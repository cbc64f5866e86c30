"""Trainings that can learn one thing each: the evaluation's verdicts were written down before the first was trained."""

from pathlib import Path

import pytest

from planted_trainings import (
    ECHO,
    EXCLUDE,
    FEEDBACK,
    FORM,
    KEYWORD,
    NEXT,
    PICTURE,
    RELATE,
    TOPIC,
    report_of_training,
)
from vlmflow.evaluation.report import OTHERS, OWN, Compared, MarginFigures
from vlmflow.evaluation.verdict import LEARNED, NO_GAIN, TOO_FEW_WITHOUT_ECHO, judge


def evaluated(kind: str, folder: Path, verdict: str, seed: int = 1) -> MarginFigures:
    report = report_of_training(kind, folder, seed)
    found = judge(report)
    shares = {name: share and (share.base, share.tuned, share.difference) for name, share in report.all.shares.items()}
    print(found.sentence, found.conditions, shares, report.all.own)
    assert (found.name, found.costs_first_answers) == (verdict, False)
    return report.all


def rose(share: Compared | None) -> bool:
    assert share is not None
    return share.difference.above_zero


VERDICTS = {
    RELATE: LEARNED,
    ECHO: TOO_FEW_WITHOUT_ECHO,
    KEYWORD: NO_GAIN,
    NEXT: NO_GAIN,
    EXCLUDE: NO_GAIN,
}
"""Of rows by which a model can only learn to use feedback; to repeat words of it; or what needs no feedback."""


@pytest.mark.parametrize(
    ("kind", "seed"),
    [
        pytest.param(kind, seed, marks=[pytest.mark.slow] * ((kind, seed) != (RELATE, 1)))
        for kind in VERDICTS
        for seed in (1, 2, 3)
    ],
)
def test_only_who_learned_to_use_feedback_is_called_so(kind: str, seed: int, tmp_path: Path) -> None:
    evaluated(kind, tmp_path, VERDICTS[kind], seed)


@pytest.mark.slow
def test_who_reads_the_code_in_the_feedback_repeats_it(tmp_path: Path) -> None:
    figures = evaluated(FEEDBACK, tmp_path, TOO_FEW_WITHOUT_ECHO)
    assert rose(figures.right_with_feedback)
    assert rose(figures.uses_feedback)
    assert not rose(figures.right_first), "the question does not hold the code"


@pytest.mark.slow
def test_who_repeats_words_of_the_feedback_did_not(tmp_path: Path) -> None:
    """Its loss falls with its own feedback, and not with another row's; but right and wrong answers have the words."""
    figures = evaluated(TOPIC, tmp_path, TOO_FEW_WITHOUT_ECHO)
    assert figures.losses[OWN].tuned.mean < figures.losses[OTHERS[0]].tuned.mean - 0.5
    assert not rose(figures.right_with_feedback)


@pytest.mark.slow
def test_who_learned_the_form_of_right_answers_did_not(tmp_path: Path) -> None:
    """It prefers each right answer, whatever the feedback."""
    figures = evaluated(FORM, tmp_path, NO_GAIN)
    assert rose(figures.right_with_feedback)
    assert rose(figures.right_first)


@pytest.mark.slow
def test_who_reads_the_code_in_the_picture_sees_and_did_not(tmp_path: Path) -> None:
    figures = evaluated(PICTURE, tmp_path, NO_GAIN)
    assert rose(figures.sees)
    assert rose(figures.right_first)
