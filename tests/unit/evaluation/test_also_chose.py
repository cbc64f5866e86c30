"""Whether val also chose what it judges: by how many evaluations, and trials of a search."""

from pathlib import Path

import pytest
from msgspec import structs

from made_accounts import some_report
from vlmflow.config.after_training import ChosenBy
from vlmflow.core.account import write_account
from vlmflow.evaluation.report import AlsoChose
from vlmflow.evaluation.verdict import NO_GAIN, TOO_FEW, Verdict, also_chose, with_how_val_was_used

SEARCH = ChosenBy(search="s", trial=3, trials=12, study="0" * 64, settings={})


@pytest.mark.parametrize(
    ("chosen_by", "trials", "said"),
    [
        (None, 1, "Val also chose the checkpoint, by 20 evaluations: this flatters it."),
        (
            SEARCH,
            12,
            "Val also chose the checkpoint, by 20 evaluations, and its settings, of 12 trials of a search: this "
            "flatters it.",
        ),
    ],
)
def test_evaluations_and_trials_are_counted(tmp_path: Path, chosen_by: ChosenBy | None, trials: int, said: str) -> None:
    report = structs.replace(some_report(), eval_losses=[(step, 1.0) for step in range(20)])
    write_account(tmp_path / "report.json", report)
    found = also_chose(tmp_path, chosen_by)
    assert found == AlsoChose(20, trials)
    assert found.in_words == said


def test_too_few_rows_of_a_half_name_the_other() -> None:
    few, none = (Verdict(name, False, "Said.") for name in (TOO_FEW, NO_GAIN))
    halved = {"other_half": 1200, "no_wrong": 3}
    other = "Said. Val's other 1,200 rows chose the checkpoint, so they cannot judge it."
    assert with_how_val_was_used(few, None, halved) == other
    assert with_how_val_was_used(few, None, {"no_wrong": 3}) == with_how_val_was_used(none, None, halved) == "Said."
    chose = AlsoChose(20, 1)
    assert with_how_val_was_used(none, chose, {}) == f"Said. {chose.in_words}"
