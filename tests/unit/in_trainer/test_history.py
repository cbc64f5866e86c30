"""The losses in a trainer's log."""

from typing import Any

import pytest

from vlmflow.in_trainer.messages import evaluated, logged, stalled


@pytest.mark.parametrize(
    "entry", [{"eval_loss": 1.0}, {"step": "2", "eval_loss": 1.0}, {"step": 2, "eval_loss": "1"}, {"step": 2}]
)
def test_an_entry_of_another_form_counts_as_not_logged(entry: dict[str, Any]) -> None:
    history = [{"step": 1, "eval_loss": 3.0}, entry, {"step": 3, "eval_loss": 3.0}]
    assert logged(history, "eval_loss") == [(1, 3.0), (3, 3.0)]
    assert [evaluated(history, step) for step in (1, 2, 3)] == [True, False, True]
    assert stalled(history, 1)
    assert not stalled(history, 2)
