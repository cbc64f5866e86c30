"""What a plan says about the runs that it would train."""

from pathlib import Path

import yaml

from harness.plan_notes import notes
from made_stats import some_stats
from vlmflow.config.model import check_config
from vlmflow.core.account import write_account
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
    assert notes(SETTINGS, runs, tmp_path) == [f"data set fire: {said}"]
    (tmp_path / "data" / "fire" / "stats.json").write_text("{}")
    assert notes(SETTINGS, runs, tmp_path) == [], "of another version"
