"""What is said at the end of a run."""

from pathlib import Path

import msgspec

from made_stats import some_stats
from vlmflow.core.files import write_json
from vlmflow.reports.summary import summary

FACTS = {
    "data": msgspec.to_builtins(some_stats()),
    "training": {"best": {"eval_loss": 1.0, "step": 4}},
    "smoke": {
        "lengths": {"median": 10, "longest": [{"tokens": 20}]},
        "fitted": {"train": {"left_out": 0, "shortened": 0}},
        "full_run": {"readable": "2 h"},
    },
}


def test_the_pages_that_are_there_are_named(tmp_path: Path) -> None:
    for file, content in {
        "merged/mine/provenance.json": FACTS,
        "checkpoints/mine/full/report.json": {"eval_losses": [[0, 2.0]]},
    }.items():
        (tmp_path / file).parent.mkdir(parents=True)
        write_json(tmp_path / file, content)
    assert "reports/" not in summary(tmp_path, "mine")
    (tmp_path / "reports").mkdir()
    pages = [tmp_path / "reports/data-fire.html", tmp_path / "reports/lengths-mine.html"]
    for page in pages:
        page.touch()
    assert f"pages       {pages[0]}; {pages[1]}\n" in summary(tmp_path, "mine")
