"""Two trainings by the workflow's own trainer; the evaluation tells the one that could learn from feedback.

The losses of an answer are per token; it has two, the code and the end.
"""

import json
import math
from pathlib import Path

import pytest

from planted_feedback import CODES, ROWS, RUNS
from vlmflow.core.account import read_account
from vlmflow.evaluation.accounts import HISTORY, PLACEBO, QUESTION, EvaluationReport
from vlmflow.evaluation.verdict import LEARNED, NOT_SHOWN
from vlmflow.rows.data_rows import Row, lines_of

CHANCE = math.log(len(CODES)) / 2
"""The loss per token of a guess between all codes."""


def evaluation(folder: Path, run: str) -> EvaluationReport:
    report = read_account(folder / "eval" / run / "val" / "report.json", EvaluationReport)
    assert (report.rows, report.left_out) == (ROWS["val"], {})
    print(report.sentence, json.dumps(report.all.tuned))
    return report


def test_a_run_on_real_feedback_learns_to_use_it(planted_runs: Path) -> None:
    report = evaluation(planted_runs, "real")
    assert report.verdict == LEARNED
    assert report.all.tuned_uses.mean <= -1
    assert report.all.tuned[HISTORY] < 0.15
    assert report.all.tuned[QUESTION] > CHANCE - 0.1


def test_a_run_on_shuffled_feedback_does_not(planted_runs: Path) -> None:
    """It learned that a code comes last, and nothing about which: its loss is that of a guess."""
    report = evaluation(planted_runs, "shuffled")
    assert report.verdict == NOT_SHOWN
    assert abs(report.all.tuned_uses.mean) <= 0.1
    for given in (HISTORY, PLACEBO):
        assert report.all.tuned[given] == pytest.approx(CHANCE, abs=0.1)
        assert report.all.base[given] > report.all.tuned[given] + 1


@pytest.mark.parametrize("split", ROWS)
def test_the_runs_differ_in_the_code_in_the_feedback_alone(planted_runs: Path, split: str) -> None:
    real, shuffled = (list(lines_of(planted_runs / "data" / run / f"{split}.jsonl", Row)) for run in RUNS)
    assert len(real) == len(shuffled) == ROWS[split]
    dealt_its_own = 0
    for row, other in zip(real, shuffled, strict=True):
        question, wrong, feedback, right = (turn.value for turn in row.conversations)
        assert right in CODES
        assert feedback.split().count(right) == 1
        assert right not in f"{question} {wrong}".split()
        held = other.conversations[2].value.split("\n")[1]
        expected = [question, wrong, feedback.replace(f"\n{right}\n", f"\n{held}\n"), right]
        assert [turn.value for turn in other.conversations] == expected
        dealt_its_own += held == right
    assert dealt_its_own / len(real) < 0.1
