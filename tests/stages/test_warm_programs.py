"""Programs of tests that fork from a process with their imports, and what a trainer does not import."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import session_folder
from tiny_trainings import Tiny, losses_of
from vlmflow.supervisor.train import train
from warm_programs import fresh
from workflow_runs import ROOT

STATES = ("optimizer.pt", "scheduler.pt", "rng_state_0.pth", "rng_state_1.pth")


@pytest.mark.slow
def test_a_forked_and_a_fresh_trainer_write_the_same_checkpoint(tmp_path: Path) -> None:
    tiny = Tiny.write(tmp_path, vision=True)
    training = tiny.training(processes=2, max_steps=3, checkpoint_steps=1, evaluation_steps=1)
    forked = train(training, tmp_path / "forked", 2, "train_model r")
    with fresh():
        alone = train(training, tmp_path / "alone", 2, "train_model r")
    handed_over = (session_folder.folder() / ".venv.log").read_text()
    assert str(tmp_path / "forked") in handed_over
    assert str(tmp_path / "alone") not in handed_over
    here, there = forked.last.folder, alone.last.folder
    assert {file.name for file in here.iterdir()} == {file.name for file in there.iterdir()} > set(STATES)
    for file in here.glob("*.safetensors"):
        assert file.read_bytes() == (there / file.name).read_bytes()
    for name in STATES:
        assert same(*(torch.load(folder / name, weights_only=False) for folder in (here, there))), name
    assert losses_of(training, tmp_path / "forked") == losses_of(training, tmp_path / "alone")


def same(one: Any, other: Any) -> bool:
    """Compare what torch saved, to the last bit."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(np.array_equal(np.asarray(one), np.asarray(other)))


ENDS = {
    "with a thread that still runs": "import threading, time\n"
    "threading.Thread(target=lambda: (time.sleep(0.3), print('done', flush=True))).start()",
    "interrupted": "raise KeyboardInterrupt",
    "after a text that is no UTF-8": "import sys\nprint('name \\udc80', file=sys.stderr)",
}


@pytest.mark.parametrize("how", ENDS)
def test_a_forked_program_ends_as_a_fresh_one(tmp_path: Path, how: str) -> None:
    forked = run(program(tmp_path / "forked", ENDS[how]))
    with fresh():
        alone = run(program(tmp_path / "alone", ENDS[how]))
    assert was_handed_over(tmp_path / "forked")
    assert not was_handed_over(tmp_path / "alone")
    assert (forked.returncode, forked.stdout) == (alone.returncode, alone.stdout)
    assert forked.stderr.splitlines()[-1:] == alone.stderr.splitlines()[-1:]


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_program_without_standard_files_is_handed_over(tmp_path: Path, closed: str) -> None:
    script = program(tmp_path, "from pathlib import Path\nPath(__file__).with_name('ran').touch()")
    done = subprocess.run(["sh", "-c", f'exec "$0" "$1" {closed}', sys.executable, script], check=False, timeout=60)
    assert done.returncode == 0
    assert (tmp_path / "ran").exists()
    assert was_handed_over(tmp_path)


def test_bad_callers_do_not_end_the_server(tmp_path: Path) -> None:
    script = str(program(tmp_path, "import time\ntime.sleep(60)"))
    good = {"words": [sys.executable, script], "folder": str(tmp_path), "environment": dict(os.environ), "mask": 0}
    for call, then in (({}, b""), ([], b""), ({"words": None}, b""), (good | {"process": os.getpid()}, b"\xff")):
        with socket.socket(socket.AF_UNIX) as caller, Path(os.devnull).open("r+b") as nothing:
            caller.connect(str(session_folder.folder() / ".venv"))
            text = json.dumps(call).encode()
            socket.send_fds(caller, [len(text).to_bytes(4)], [nothing.fileno()] * 3)
            caller.sendall(text + then)
    assert run(program(tmp_path / "later", "print('here')")).stdout == "here\n"
    assert was_handed_over(tmp_path / "later")


def test_a_program_whose_server_has_gone_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLMFLOW_WARM", str(tmp_path))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / Path(sys.prefix).name))
        listener.listen()
        calling = subprocess.Popen([sys.executable, program(tmp_path, "")], stderr=subprocess.PIPE, text=True)
        caller, _ = listener.accept()
        caller.recv(1 << 20)
        caller.shutdown(socket.SHUT_WR)
        _, said = calling.communicate(timeout=60)
        caller.close()
    assert calling.returncode == 70
    assert "sitecustomize.py: ConnectionError('the process that ran this program (warm_programs.py) has ended')" in said


def program(folder: Path, code: str) -> Path:
    """Write a program with the name of one that is handed over."""
    folder.mkdir(exist_ok=True)
    (folder / "samplers.py").write_text(code)
    return folder / "samplers.py"


def run(script: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, script], capture_output=True, text=True, check=False, timeout=60)


def was_handed_over(folder: Path) -> bool:
    return f"{folder}/samplers.py" in (session_folder.folder() / ".venv.log").read_text()


UNWRAP = """
import sys
from torch.nn import Linear
from vlmflow.config.strategies import strategy_of
from vlmflow.in_trainer import engine
engine.spare_deepspeed(strategy_of(sys.argv[1]))
from accelerate.utils import extract_model_from_parallel
extract_model_from_parallel(Linear(1, 1))
print("deepspeed" in sys.modules)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "imports"), [("ddp", "False"), ("zero2", "True")])
def test_deepspeed_is_imported_only_where_it_trains(strategy: str, imports: str) -> None:
    """Otherwise accelerate imports it to ask whether it wraps the model."""
    words = [sys.executable, "-c", UNWRAP, strategy]
    done = subprocess.run(words, capture_output=True, text=True, check=True, env={"PYTHONPATH": str(ROOT / "scripts")})
    assert done.stdout.split()[-1] == imports
