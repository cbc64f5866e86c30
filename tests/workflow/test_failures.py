"""The report of a failed stage: its cause, once, at the very end."""

import json
import sys
from pathlib import Path

import pytest

from forked_snakemake import called
from vlmflow.harness import stage
from workflow_runs import ROOT

CAUSE = "the stage failed: raw/mine/rows.jsonl: the workflow does not read these keys, which change what rows mean:"

SETTINGS = "datasets: {mine: {kind: prompt_completion, train: rows.jsonl, modality: text}}"


def test_the_cause_is_printed_once_and_last(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "q", "completion": "a", "label": False}) + "\n")
    (tmp_path / "my-run.yaml").write_text(SETTINGS)
    call = [sys.executable, "-m", "snakemake", "--snakefile", str(ROOT / "Snakefile"), "--directory", str(tmp_path)]
    words = ["--configfile", str(tmp_path / "my-run.yaml"), "--cores", "1", "--", "converted/mine/train.jsonl"]
    done = called([*call, *words])

    assert done.returncode == 1
    said = done.stderr
    assert said.count(CAUSE) == 1
    last = said[said.index("\nconvert_rows (logs/convert_rows/mine.train.log):\n") :].splitlines()
    assert last[2] == CAUSE
    assert last[-1].startswith("  what to do: ")
    assert "Error in rule convert_rows:" in said
    for empty in ("CalledProcessError", "message: None", "At least one job did not complete"):
        assert empty not in said


def test_a_cause_that_cannot_be_logged_is_printed_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        stage._fail("no space", Path("/dev/full"), job=object())
    assert capsys.readouterr().err == "the stage failed: no space\n"
