"""Trainings that can learn one thing each: the evaluation's verdicts were written down before the first was trained."""

from pathlib import Path

import pytest

from planted_trainings import FEEDBACK, FORM, PICTURE, TOPIC, figures_of_training
from vlmflow.evaluation.report import OTHER, OWN, Compared, MarginFigures
from vlmflow.evaluation.verdict import LEARNED, NO_GAIN, judge


def evaluated(kind: str, folder: Path, verdict: str) -> MarginFigures:
    figures = figures_of_training(kind, folder)
    found = judge(figures)
    print(found.sentence, {name: share and share.difference for name, share in figures.shares.items()})
    assert (found.name, found.costs_first_answers) == (verdict, False)
    return figures


def rose(share: Compared | None) -> bool:
    assert share is not None
    return share.difference.above_zero


def test_who_reads_the_code_in_the_feedback_learned_to_use_it(tmp_path: Path) -> None:
    figures = evaluated(FEEDBACK, tmp_path, LEARNED)
    assert rose(figures.right_with_feedback)
    assert not rose(figures.right_first), "the question does not hold the code"


@pytest.mark.slow
def test_who_repeats_words_of_the_feedback_did_not(tmp_path: Path) -> None:
    """Its loss falls with its own feedback, and not with another row's; but right and wrong answers have the words."""
    figures = evaluated(TOPIC, tmp_path, NO_GAIN)
    assert figures.losses[OWN].tuned.mean < figures.losses[OTHER].tuned.mean - 0.5
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
