"""A signal ends a start, and is no answer of the trial."""

import subprocess
import sys
from pathlib import Path

import pytest

from vlmflow.search.starts import starts_of
from vlmflow.training.run_folder import RunFolder
from workflow_runs import ROOT

START = """
import os, signal, subprocess, sys, time
from pathlib import Path
from vlmflow.search.starts import one_start
from vlmflow.training.run_folder import RunFolder

def send():
    signal.raise_signal(signal.SIGTERM)

if sys.argv[2] == "fork":
    os.register_at_fork(after_in_parent=send)
with one_start(RunFolder(Path(sys.argv[1])), 4):
    time.sleep(0.1)
    if sys.argv[2] == "fork":
        subprocess.run(["true"], preexec_fn=lambda: None)
    else:
        send()
    print("it goes on")
"""


@pytest.mark.parametrize("when", ["in the block", "fork"])
def test_sigterm_ends_a_start_and_is_recorded(tmp_path: Path, when: str) -> None:
    """Also while it starts a process: Python drops what a handler of signals raises there."""
    done = subprocess.run(
        [sys.executable, "-c", START, str(tmp_path), when],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(ROOT / "scripts")},
    )
    assert (done.returncode, done.stdout) == (143, ""), done.stderr
    ended = starts_of(RunFolder(tmp_path), 4)
    assert (ended.tries, ended.since) == (0, None)
    assert ended.seconds >= 0.1
