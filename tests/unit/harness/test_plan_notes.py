"""What a plan says about the runs that it would train."""

from pathlib import Path

import yaml

from made_accounts import some_fitted
from made_stats import some_stats
from vlmflow.config.model import check_config
from vlmflow.core.account import write_account
from vlmflow.harness.plan import notes
from workflow_runs import ROOT

SETTINGS = check_config(yaml.safe_load((ROOT / "config.yaml").read_text()), [])


def test_bad_text_is_told_once_for_each_data_set_that_is_known(tmp_path: Path) -> None:
    runs = ["qwen3vl-fire", "qwen3vl-fire-good", "qwen3-alpaca"]
    assert notes(SETTINGS, runs, tmp_path) == []
    for dataset, trained in (("fire", {3: 46, 10: 54}), ("fire-good", {10: 54}), ("alpaca", {})):
        stats = some_stats(dataset=dataset, trained_characters=trained)
        (tmp_path / "data" / dataset).mkdir(parents=True)
        write_account(tmp_path / "data" / dataset / "stats.json", stats)
    said = "46% of the trained text is attempts scored below 8; run qwen3vl-fire-good trains the others"
    assert [line for line in notes(SETTINGS, runs, tmp_path) if "data set" in line] == [f"data set fire: {said}"]
    (tmp_path / "data" / "fire" / "stats.json").write_text("{}")
    assert [line for line in notes(SETTINGS, runs, tmp_path) if "data set" in line] == [], "of another version"


def test_a_model_that_is_not_supported_is_told(tmp_path: Path) -> None:
    both = yaml.safe_load((ROOT / "config.yaml").read_text())
    both["models"]["qwen3-8b"]["model_type"] = "gemma3n"
    (line,) = notes(check_config(both, []), ["qwen3vl-fire", "qwen3-alpaca"], tmp_path)
    assert line.startswith("models.qwen3-8b.model_type: gemma3n: no test has taken such a model")


def test_the_steps_of_a_run_are_told_with_what_there_is_to_choose_from(tmp_path: Path) -> None:
    """From the rows of the data set, and from those that fit once that is known."""
    for dataset, rows in (("fire", 384), ("alpaca", 1_000)):
        (tmp_path / "data" / dataset).mkdir(parents=True)
        stats = some_stats(dataset=dataset, examples={"train": rows, "val": 9, "test": 0})
        write_account(tmp_path / "data" / dataset / "stats.json", stats)
    runs = ["qwen3vl-fire", "qwen3-alpaca"]
    few = "run qwen3vl-fire: 6 steps, 1 evaluation: nothing to choose from"
    assert notes(SETTINGS, runs, tmp_path) == [few, "run qwen3-alpaca: 96 steps, 11 evaluations"]
    fitted = some_fitted()
    (tmp_path / "fitted" / "qwen3-alpaca").mkdir(parents=True)
    write_account(tmp_path / "fitted" / "qwen3-alpaca" / "account.json", fitted)
    assert fitted.train.lengths.rows == 9
    assert notes(SETTINGS, runs, tmp_path) == [few, "run qwen3-alpaca: 3 steps, 3 evaluations"]
