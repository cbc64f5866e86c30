"""No minute passes without a line while a job runs here."""

import subprocess
import sys
from pathlib import Path

import pytest

from workflow_runs import ROOT

WATCHED = """
import sys, time
from types import SimpleNamespace
from vlmflow.harness import screen
from snakemake.logging import logger

screen.SILENCE = 2
logger.setLevel("INFO")
logger.addHandler(__import__("logging").StreamHandler())
verify = SimpleNamespace(message="Verifying x", log=["logs/verify/x.log"])
train = SimpleNamespace(message=None, rule=SimpleNamespace(name="train"), log=[])
running = []
screen.watch(SimpleNamespace(scheduler=SimpleNamespace(running=running)))
time.sleep(3)
running.extend([verify, train])
for seconds in range(12):
    print("a stage's line", file=sys.stderr, flush=True)
    time.sleep(0.25)
print("silence", file=sys.stderr, flush=True)
time.sleep(5)
"""


@pytest.mark.lengthy
def test_silence_is_broken_and_nothing_else(tmp_path: Path) -> None:
    said = tmp_path / "said"
    with said.open("w") as file:
        call = [sys.executable, "-c", WATCHED]
        subprocess.run(call, stderr=file, env={"PYTHONPATH": str(ROOT / "scripts")}, check=True)
    lines = said.read_text().splitlines()
    assert lines[:13] == [*["a stage's line"] * 12, "silence"]
    assert set(lines[13:]) == {"still running: Verifying x (logs/verify/x.log); train"}
