"""What a call of Snakemake prints: what tells a person something; its log has all lines."""

import logging
import re
from pathlib import Path
from types import SimpleNamespace

from small_workflow import make_rows, snakemake
from vlmflow.harness import screen

ABOUT_ITSELF = (
    "Assuming unrestricted",
    "SNAKEMAKE",
    "Building DAG",
    "Using shell",
    "Provided cores",
    "Singularity containers",
    "Select jobs",
    "Execute 1 jobs",
    "Finished jobid",
)


def reasons(said: str) -> list[str]:
    return re.findall(r"^Reason: (.*)$", said, re.MULTILINE)


def test_a_run_is_its_jobs_and_how_far_they_are(tmp_path: Path) -> None:
    said = snakemake(make_rows(tmp_path), "raw/x/rows.jsonl")
    assert [words for words in ABOUT_ITSELF if words in said] == []
    assert len(re.findall(r"^\[.* \d{4}\] Fetching rows\.jsonl$", said, re.MULTILINE)) == 1
    assert len(reasons(said)) == 1
    assert "1 of 1 steps (100%) done" in said
    named = re.search(r"^Complete log\(s\): (.+)$", said, re.MULTILINE)
    assert [words for words in ABOUT_ITSELF if words not in Path(named[1]).read_text()] == []


def test_a_plan_gives_the_first_cause_of_a_chain(tmp_path: Path) -> None:
    said = snakemake(make_rows(tmp_path), "reports/data-x.html", "-n")
    assert reasons(said) == ["Missing output files: reports/data-x.html"]
    assert said.count("Job stats:") == 1
    assert "provenance information" not in said
    complete = snakemake(tmp_path, "reports/data-x.html", "-n", "--verbose")
    assert len(reasons(complete)) == complete.count("Input files updated by another job") + 1 == 5
    assert "SNAKEMAKE" in complete


def test_what_is_said_of_ctrl_c_and_sigterm_is_shown() -> None:
    scheduler = SimpleNamespace(_user_kill=None)
    shown = screen._Filter(SimpleNamespace(dryrun=False, scheduler=scheduler)).filter
    record = logging.makeLogRecord({"levelno": logging.INFO, "module": "job_scheduler", "funcName": "schedule"})
    assert not shown(record)
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert shown(record)
    scheduler._user_kill = "graceful"
    assert shown(record)
