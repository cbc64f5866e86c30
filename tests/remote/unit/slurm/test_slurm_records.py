"""Which job makes which stage, by records in the working directory."""

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from slurm_commands import SlurmCommands
from vlmflow.core.errors import VlmflowError
from vlmflow.remote.slurm import records
from vlmflow.remote.slurm.queue import SlurmError
from vlmflow.remote.slurm.records import FRESH, Record, Records

ONE, OTHER = "vlmflow folder identity stage-a stage-b", "vlmflow folder changed stage-b"


CLAIM = """
import os, sys
from pathlib import Path
from vlmflow.remote.slurm.records import Records

assert Records(Path(sys.argv[1])).claim(sys.argv[2]) is None
os.kill(os.getpid(), 9)
"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SlurmCommands:
    return SlurmCommands(tmp_path, monkeypatch)


@pytest.fixture
def become(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    return lambda name: monkeypatch.setattr(records, "_me", lambda: name)


def state(slurm: SlurmCommands, word: str) -> None:
    slurm.answer("scontrol", f"JobId=7 JobState={word} Reason=None")


def test_a_stage_that_a_job_makes_is_not_submitted_by_somebody_else(
    slurm: SlurmCommands, become: Callable[[str], None], tmp_path: Path
) -> None:
    become("ann")
    kept = Records(tmp_path / "jobs")
    assert kept.claim(ONE) is None
    become("bob")
    with pytest.raises(VlmflowError, match=r"ann submits this stage now, on .*stage-b"):
        kept.claim(OTHER)
    become("ann")
    kept.submitted(ONE, "7")
    state(slurm, "PENDING")
    found = kept.claim(OTHER)
    assert isinstance(found, Record)
    assert (found.job, found.comment, found.by) == ("7", ONE, "ann")
    become("bob")
    with pytest.raises(VlmflowError, match=r"job 7 of ann makes this stage in this folder") as refused:
        kept.claim(OTHER)
    assert "scancel 7" in refused.value.next_step
    state(slurm, "COMPLETED")
    assert kept.claim(OTHER) is None


def test_what_slurm_does_not_say_is_not_taken_for_an_end(slurm: SlurmCommands, tmp_path: Path) -> None:
    kept = Records(tmp_path / "jobs")
    kept.claim(ONE)
    kept.submitted(ONE, "7")
    slurm.answer("scontrol", fails="Unable to contact slurm controller")
    with pytest.raises(SlurmError):
        kept.claim(ONE)
    slurm.answer("scontrol", fails="slurm_load_jobs error: Invalid job id specified")
    assert kept.claim(ONE) is None


def test_a_record_of_an_ended_job_or_of_a_killed_call_hinders_nobody(
    become: Callable[[str], None], tmp_path: Path
) -> None:
    become("ann")
    kept = Records(tmp_path / "jobs")
    kept.claim(ONE)
    kept.ended(ONE)
    become("bob")
    assert kept.claim(ONE) is None
    become("ann")
    killed = subprocess.run([sys.executable, "-c", CLAIM, str(tmp_path / "killed"), ONE], check=False)
    assert killed.returncode == -9
    assert Records(tmp_path / "killed").claim(ONE) is None, "the call that submitted is gone"
    for stage in ("stage-a", "stage-b"):
        file = tmp_path / "jobs" / stage
        os.utime(file, (file.stat().st_atime, file.stat().st_mtime - FRESH - 1))
    assert kept.claim(ONE) is None, "nobody submits for so long without renewing the record"
    for content in (b"", b"{", b"\xff"):
        (tmp_path / "jobs" / "stage-a").write_bytes(content)
        kept.ended("vlmflow folder identity stage-b")
        assert kept.claim(ONE) is None, "cut by a full disk: nothing was submitted"


def test_the_end_of_a_job_leaves_the_record_of_another_call(tmp_path: Path) -> None:
    """It saw the end first, and makes the stage again."""
    kept = Records(tmp_path / "jobs")
    kept.claim(ONE)
    with ProcessPoolExecutor(1, get_context("fork")) as pool:
        pool.submit(kept.submitted, OTHER, "8").result()
    kept.ended(ONE)
    assert sorted(file.name for file in (tmp_path / "jobs").glob("stage-*")) == ["stage-b"]


def claims(folder: Path) -> bool:
    try:
        return Records(folder).claim(ONE) is None
    except VlmflowError:
        return False


def test_of_many_that_claim_at_once_one_does(tmp_path: Path) -> None:
    with ProcessPoolExecutor(8, get_context("fork")) as pool:
        assert sum(pool.map(claims, [tmp_path / "jobs"] * 8)) == 1
    assert (tmp_path / "jobs" / "lock").stat().st_mode & 0o666 == 0o666
