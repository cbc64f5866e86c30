"""What the scores of trained answers mean."""

from pathlib import Path

import pytest

from fire_rows import fire_row, split_files, split_rules, training_form
from vlmflow.config.data_settings import DatasetSettings
from vlmflow.rows.sharegpt import in_words
from vlmflow.rows.validate import validate


@pytest.mark.parametrize(
    ("form", "trained"),
    [
        # The answers of each row have the scores 2, 3 and 10; train has ten rows.
        (training_form("trajectory"), {2: 10, 3: 10, 10: 10}),
        (training_form("timestep", 6), {2: 10, 3: 10, 10: 10}),
        (training_form("trajectory", min_score=3), {3: 10, 10: 10}),
        (training_form("timestep", 6, 3), {3: 10, 10: 10}),
        (training_form("trajectory", None, 8, "last_good"), {10: 20}),
        (training_form("trajectory", None, None, "last_good"), {2: 10, 3: 10, 10: 20}),
    ],
)
def test_the_account_has_what_is_trained_of_each_score(
    tmp_path: Path, form: DatasetSettings, trained: dict[int, int]
) -> None:
    """In train alone, and history does not count."""
    rows = [fire_row(f"gqa/{number}.jpg", f"question {number}", rounds=3) for number in range(12)]
    rules = split_rules(0.1, 1, 0.0, form=form.form)
    stats = validate([split_files(tmp_path, "train", rows, form)], tmp_path / "out", rules, processes=1)
    assert stats.examples["train"] in (10, 20, 30)
    answer = len("Thought: t1.\nAnswer: a1")
    assert stats.trained_characters == {score: answer * count for score, count in trained.items()}


@pytest.mark.parametrize(
    ("trained", "good_run", "said"),
    [
        ({3: 46, 9: 54}, "good", "46% of the trained text is attempts scored below 8; run good trains the others"),
        ({7: 1, 8: 2}, None, "33% of the trained text is attempts scored below 8; datasets.mine.min_score: 8 trains"),
        ({8: 7, 10: 3}, "good", "all of the trained text is attempts scored at least 8"),
        ({}, None, None),
    ],
)
def test_the_share_of_bad_attempts_is_said_with_what_trains_the_others(
    trained: dict[int, int], good_run: str | None, said: str | None
) -> None:
    found = in_words(trained, ["mine"], good_run)
    assert found == said if said is None else found is not None and found.startswith(said)
