import subprocess
import sys
from pathlib import Path

import pytest

from vlmflow.core.errors import PassingError, VlmflowError
from vlmflow.supervisor.run_folder import RunFolder
from workflow_runs import ROOT

SCRIPTS = ROOT / "scripts"

HOLD = """
import subprocess, sys, time
from pathlib import Path
from vlmflow.supervisor.run_folder import RunFolder
with RunFolder(Path(sys.argv[1])).held({}) as lock:
    child = subprocess.Popen(["sleep", "60"], pass_fds=[lock])
    print(child.pid, flush=True)
    time.sleep(60)
"""


def test_no_two_trainers_hold_one_folder(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    refused = pytest.raises(VlmflowError, match=r"process \d+ on .* is training here")
    with folder.held({"a": 1}), refused, folder.held({"a": 1}, patience=0):
        pass
    with folder.held({"a": 1}, patience=0):
        pass


def test_an_orphan_of_a_killed_trainer_keeps_the_folder(tmp_path: Path) -> None:
    """The lock is inherited: it is held while any child that inherited it lives, and free when the last has ended."""
    folder = RunFolder(tmp_path / "run")
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder.path)],
        stdout=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": SCRIPTS},
    )
    orphan = int(holder.stdout.readline())
    holder.kill()
    holder.wait()
    with pytest.raises(VlmflowError, match=f"process {holder.pid} on"), folder.held({}, patience=0):
        pass
    subprocess.run(["kill", str(orphan)], check=True)
    with folder.held({}, patience=5):
        pass


@pytest.mark.parametrize(("error", "stays"), [(VlmflowError, False), (PassingError, True)])
def test_a_folder_is_set_aside_where_its_input_changed_and_not_where_a_disk_failed(
    tmp_path: Path, error: type[VlmflowError], stays: bool
) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    with pytest.raises(error) as raised, folder.set_aside_where_refused("train_model x"):
        raise error("1 of 2 pictures cannot be read", "check the disk")
    assert folder.path.exists() is stays
    assert ("the input changed" in str(raised.value)) is not stays


def test_the_name_of_a_holder_moves_no_cursor_and_is_short(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with folder.held({}):
        (folder.path / "lock").write_bytes(b"process 1 on \x1b]0;title\x07\xff" + b"x" * 10_000)
        name = folder.holder()
        assert name.startswith("process 1 on �]0;title��xxx")
        assert len(name) <= 200
        with pytest.raises(PassingError) as raised, folder.held({}, patience=0):
            pass
    assert f"{name} is training here" in raised.value.cause
