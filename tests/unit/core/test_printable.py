"""No message of a command steers the terminal, whatever a folder is called."""

import subprocess
import sys
from pathlib import Path

import pytest

from workflow_runs import program


@pytest.mark.parametrize(
    ("script", "does"),
    [("track_run", "odd�[31m/merged/mine"), ("check_provenance", "take a folder that vlmflow published")],
)
def test_cause_and_next_step_steer_no_terminal(script: str, does: str, tmp_path: Path) -> None:
    folder = tmp_path / "odd\x1b[31m"
    provenance = folder / "merged" / "mine" / "provenance.json"
    provenance.parent.mkdir(parents=True)
    provenance.write_text("{}")
    words = [sys.executable, str(program(script)), "--run", "mine", "--directory", str(folder)]
    run = subprocess.run(words, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    cause, step = run.stderr.splitlines()
    assert "odd�[31m/merged/mine/provenance.json: " in cause
    assert step.startswith("  what to do: ")
    assert does in step
    assert "\x1b" not in run.stdout + run.stderr
