"""The real workflow on forty rows of text, in its own folder, in seconds."""

import json
import sys
from pathlib import Path
from typing import Any

import yaml

from forked_snakemake import called
from workflow_runs import ROOT


def make_rows(folder: Path) -> Path:
    """Write the rows of data set `x`."""
    rows = [{"prompt": f"q{number:02}", "completion": f"a{number:02}"} for number in range(40)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def snakemake(folder: Path, target: str, *words: str, root: Path = ROOT, **settings: Any) -> str:
    """Run Snakemake for a target in the folder of `make_rows`, and return its output.

    settings: those of data set `x`. Raises AssertionError with the output if it fails.
    """
    block = {"kind": "prompt_completion", "modality": "text", "train": "rows.jsonl"} | settings
    (folder / "mine.yaml").write_text(yaml.safe_dump({"datasets": {"x": block}}))
    call = [sys.executable, "-m", "snakemake", "--snakefile", str(root / "Snakefile"), "--directory", str(folder)]
    call += ["--configfile", str(folder / "mine.yaml"), "--cores", "1", *words, "--", target]
    done = called(call)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout + done.stderr
