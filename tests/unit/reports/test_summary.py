"""The summary at the end of a run."""

from pathlib import Path

from made_accounts import some_provenance, some_report
from vlmflow.core.account import write_account
from vlmflow.reports.summary import summary


def test_existing_pages_are_named(tmp_path: Path) -> None:
    write_account(tmp_path / "merged/mine/provenance.json", some_provenance())
    write_account(tmp_path / "checkpoints/mine/full/report.json", some_report())
    assert "reports/" not in summary(tmp_path, "mine")
    assert "loss 3.00 at step 4, 2.00 at step 8" in summary(tmp_path, "mine")
    (tmp_path / "reports").mkdir()
    pages = [tmp_path / f"reports/{name}.html" for name in ("data-fire", "lengths-mine", "run-mine")]
    for page in pages:
        page.touch()
    assert f"pages       {pages[0]}; {pages[1]}; {pages[2]}\n" in summary(tmp_path, "mine")
