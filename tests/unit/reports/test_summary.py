"""The summary at the end of a run."""

from pathlib import Path

import pytest

from made_accounts import some_evaluation, some_provenance
from vlmflow.core.account import write_account
from vlmflow.evaluation.report import EvaluatedModel
from vlmflow.reports.overview import summary, summary_files
from vlmflow.reports.provenance import published_weights


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_account(tmp_path / "merged/mine/provenance.json", some_provenance())
    return tmp_path


def lines(folder: Path) -> list[str]:
    return summary(folder, "mine", "fire", "runs/here/").splitlines()


def test_what_is_there_is_on_one_screen(folder: Path) -> None:
    (folder / "reports").mkdir()
    for page in ("data-fire", "run-mine", "run-other"):
        (folder / f"reports/{page}.html").touch()
    evaluation = some_evaluation(tuned=EvaluatedModel(published_weights(folder / "merged/mine")))
    write_account(folder / "eval/mine/test/report.json", evaluation)
    assert lines(folder) == [
        "",
        "mine is done.",
        "  rows        train: 1 in, 1 kept, 0 rejected",
        "              why: runs/here/data/fire/counts.html; the rows: runs/here/data/fire/quarantine.jsonl",
        "  lengths     10 tokens in the median row, 20 in the longest; over-long rows: 0 left out, 0 shortened",
        "  smoke gate  passed; the full run takes 2 h",
        "  validation  loss 3.00 at step 4, 2.00 at step 8",
        "              curve: runs/here/checkpoints/mine/full/loss.png",
        "  verdict     test: The tuned model learned to use feedback.",
        "  pages       runs/here/reports/data-fire.html",
        "              runs/here/reports/run-mine.html",
        "  weights     runs/here/merged/mine (verified; model card: README.md, origin: provenance.json)",
    ]


def test_a_verdict_on_other_weights_is_none(folder: Path) -> None:
    assert "  verdict     none yet: eval/mine/val compares it with its base" in lines(folder)
    write_account(folder / "eval/mine/val/report.json", some_evaluation())
    assert "  verdict     val: of other weights: remove eval/mine/val and make it again" in lines(folder)


def test_what_cannot_be_read_is_named(folder: Path) -> None:
    (folder / "eval/mine/val").mkdir(parents=True)
    (folder / "eval/mine/val/report.json").write_text("{}")
    assert any(line.startswith(f"  verdict     val: cannot be read: {folder}/eval/mine/val/") for line in lines(folder))
    (folder / "merged/mine/provenance.json").write_text("no JSON")
    said = lines(folder)
    assert said[2].startswith(f"  origin      cannot be read: {folder}/merged/mine/provenance.json: ")
    assert said[-1].startswith("  weights     runs/here/merged/mine ")


def test_every_file_that_is_read_is_listed(folder: Path) -> None:
    """On a cluster only these are copied from the storage."""
    for target, name in summary_files("mine", "fire"):
        place = folder / target / name
        place.parent.mkdir(parents=True, exist_ok=True)
        if not place.exists():
            write_account(place, some_evaluation())
    everything = lines(folder)
    listed = {folder / target / name for target, name in summary_files("mine", "fire")}
    assert {file for file in folder.rglob("*") if file.is_file()} == listed
    for file in listed:
        content = file.read_bytes()
        file.unlink()
        assert lines(folder) != everything, file
        file.write_bytes(content)
