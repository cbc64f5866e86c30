import signal
import subprocess
import sys
import time
from pathlib import Path

from vlmflow.in_trainer.messages import beats_of, innermost_frames, stacks_of
from workflow_runs import ROOT

STUCK = """
import ctypes, sys, threading, time
from pathlib import Path
from vlmflow.in_trainer.messages import Doing, Heart
heart = Heart(Path(sys.argv[1]), 3)
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
sleep = ctypes.PyDLL(None).sleep

def innermost():
    print("stuck", flush=True)
    while True:
        sleep(60)  # as code that is compiled and keeps Python's lock

def outer():
    heart.beat(Doing.TRAINING)
    heart.beat(Doing.TRAINING)
    innermost()

outer()
"""


def test_a_process_that_is_stuck_in_compiled_code_says_where_it_is(tmp_path: Path) -> None:
    words = [sys.executable, "-c", STUCK, str(tmp_path)]
    environment = {"PYTHONPATH": str(ROOT / "scripts")}
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout.readline() == "stuck\n"
        assert beats_of(tmp_path, 3).read_text() == "training"
        assert innermost_frames(stacks_of(tmp_path, 3).read_text(), 3) == []
        process.send_signal(signal.SIGUSR1)
        until = time.monotonic() + 20
        while "in outer" not in (stacks := stacks_of(tmp_path, 3).read_text()) and time.monotonic() < until:
            time.sleep(0.05)
        process.kill()
    frames = innermost_frames(stacks, 2)
    assert [frame.partition(" ")[0] for frame in frames] == ["innermost", "outer"]


STACKS = """Thread 0x00007f0001 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Current thread 0x00007f0002 (most recent call first):
  File "/x/torch/distributed/distributed_c10d.py", line 2799 in all_gather
  File "/x/vlmflow/in_trainer/engine.py", line 16 in gather
  File "/x/vlmflow/in_trainer/stop.py", line 150 in on_step_end
  File "<frozen runpy>", line 88 in _run_code

Extension modules: numpy._core._multiarray_umath (total: 1)
"""


def test_the_innermost_frames_are_those_of_the_thread_that_was_asked() -> None:
    found = ["all_gather (distributed/distributed_c10d.py:2799)", "gather (in_trainer/engine.py:16)"]
    assert innermost_frames(STACKS, 2) == found
    assert innermost_frames(STACKS + STACKS, 9)[2:] == [
        "on_step_end (in_trainer/stop.py:150)",
        "_run_code (<frozen runpy>:88)",
    ]
    assert innermost_frames("", 3) == []
