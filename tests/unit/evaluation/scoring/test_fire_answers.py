"""How often our rules agree with FIRE's teacher, who scored every attempt of the student from 0 to 10.

The rules were made on the rows of the train file. The figures of docs/evaluation.md are those of this test.
"""

import json
from collections import Counter
from pathlib import Path

import pytest

from made_rows import real_rows
from vlmflow.evaluation.scoring.judge import judge, rule_of
from vlmflow.evaluation.scoring.stated import answer_in
from vlmflow.rows.chat import Reject
from vlmflow.rows.forms.fire import read_gold, read_trajectory

PAGE = Path(__file__).parents[4] / "docs" / "evaluation.md"

GOOD, BAD = 9, 4
"""Scores from and up to which an attempt is certainly right, and certainly wrong."""


def called_right(name: str) -> tuple[Counter[str], Counter[str], Counter[str]]:
    """Return, by rule, the good attempts of a file, those of them that are called right, and the bad ones that are."""
    good, found, wrong = Counter[str](), Counter[str](), Counter[str]()
    for raw in json.loads(real_rows(name).read_bytes()):
        row = json.dumps(raw).encode()
        trajectory, gold = read_trajectory(row), read_gold(row)
        assert not isinstance(trajectory, Reject)
        assert gold
        for attempt in trajectory.attempts:
            right = judge(answer_in(attempt.answer), gold).right
            good[rule_of(gold)] += attempt.score >= GOOD
            found[rule_of(gold)] += attempt.score >= GOOD and right
            wrong[rule_of(gold)] += attempt.score <= BAD and right
    return good, found, wrong


@pytest.mark.parametrize("name", ["FIRE-train-100K.json", "FIRE-test.json"])
def test_good_attempts_are_right_and_bad_ones_are_not(name: str) -> None:
    good, found, wrong = called_right(name)
    share = found.total() / good.total()
    assert wrong.total() == 0
    assert share >= 0.7
    told = PAGE.read_text()
    assert f"**{found.total()} of {good.total()}, {100 * share:.0f} %**" in told
    rows = {line.split("`")[1]: line for line in told.splitlines() if " of " in line and line.startswith("| `")}
    assert {rule for rule in good if f"| {found[rule]} of {good[rule]} |" in rows[rule]} == set(good)
