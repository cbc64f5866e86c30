import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from test_local_runs import SCRIPTS

from storage_runs import other_file_system
from vlmflow.core.errors import VlmflowError
from vlmflow.core.lease import Lease, newest

SILENCE = 4.0
"""Seconds after which these holders take over: much longer than a busy machine delays one of them."""

HOLD = f"""
import subprocess, sys, time
from pathlib import Path
from vlmflow.core.lease import Lease
folder, machine = Path(sys.argv[1]), sys.argv[2]
with Lease(folder, machine, beat=0.1, silence={SILENCE}).held(patience=float(sys.argv[3])):
    child = subprocess.Popen(["sleep", "60"])
    print(child.pid, flush=True)
    sys.stdin.read()
child.kill()
"""

Start = Callable[..., subprocess.Popen]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Return a folder in memory, because a holder that waits for a slow disk does not count."""
    with other_file_system(tmp_path) as other:
        yield other


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    """Start a holder in its own process, with that machine name."""
    begun: list[subprocess.Popen] = []

    def start(machine: str, patience: float = 0) -> subprocess.Popen:
        holder = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(folder), machine, str(patience)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={"PYTHONPATH": str(SCRIPTS)},
        )
        begun.append(holder)
        return holder

    yield start
    for holder in begun:
        if holder.poll() is None:
            for process in [*psutil.Process(holder.pid).children(), holder]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        with holder:  # closes its pipes
            pass


def holds(holder: subprocess.Popen) -> int:
    """Wait until it holds the lease; returns the process id of its child."""
    return int(holder.stdout.readline())


def test_a_living_holder_on_another_machine_is_waited_for_and_named(folder: Path, start: Start) -> None:
    holder = start("one")
    holds(holder)
    refused = pytest.raises(VlmflowError, match=f"process {holder.pid} on .* is training here")
    with refused, Lease(folder, "two", beat=0.1, silence=SILENCE).held(patience=0):
        pass
    waiting = start("two", patience=60)
    time.sleep(SILENCE + 1)  # longer than the silence after which it takes over
    assert waiting.poll() is None
    assert newest(folder).number == 1
    holder.stdin.close()
    holds(waiting)
    assert [place.name for place in folder.iterdir()] == ["lease-2.json"]
    holder.wait()


def test_a_killed_holder_is_taken_over_after_its_silence(folder: Path, start: Start) -> None:
    holder = start("one")
    orphan = holds(holder)
    holder.kill()
    psutil.Process(orphan).kill()
    begun = time.monotonic()
    with Lease(folder, "two", beat=0.1, silence=2).held(patience=0):
        assert 2 < time.monotonic() - begun < 18  # less than the lease's own silence
    assert newest(folder).released


def test_a_lease_of_a_killed_holder_on_this_machine_is_free_at_once(folder: Path, start: Start) -> None:
    """Whoever requests the lease already holds the folder's lock."""
    holder = start("one")
    orphan = holds(holder)
    holder.kill()
    psutil.Process(orphan).kill()
    begun = time.monotonic()
    with Lease(folder, "one", silence=300).held(patience=0):
        assert time.monotonic() - begun < 30


def test_a_frozen_holder_that_was_taken_over_ends_with_its_children(folder: Path, start: Start) -> None:
    holder = start("one")
    child = holds(holder)
    holder.send_signal(signal.SIGSTOP)
    with Lease(folder, "two", beat=0.1, silence=2).held(patience=0):
        holder.send_signal(signal.SIGCONT)
        assert holder.wait(timeout=30) == -signal.SIGKILL
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(child).wait(timeout=20)  # raises if it is still alive; it would end by itself after 60
        assert newest(folder).machine == "two"


def test_only_one_of_many_takes_over_a_dead_lease(folder: Path, start: Start) -> None:
    dead = {"holder": "process 1 on gone", "machine": "gone", "token": "t", "count": 7, "released": False}
    (folder / "lease-4.json").write_text(json.dumps(dead))
    starters = [start(f"machine-{number}") for number in range(5)]
    deadline = time.monotonic() + 60
    while sum(starter.poll() is None for starter in starters) > 1:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    winner = next(starter for starter in starters if starter.poll() is None)
    holds(winner)
    for loser in starters:
        if loser is not winner:
            assert f"process {winner.pid} on" in loser.communicate()[1]
    assert newest(folder).number == 5


def test_only_one_holder_gets_a_number(tmp_path: Path) -> None:
    leases = [Lease(tmp_path, f"machine-{number}") for number in range(8)]
    with ThreadPoolExecutor(len(leases)) as pool:
        for number in range(1, 50):
            won = list(pool.map(lambda lease, number=number: lease._create(number), leases))
            assert sum(won) == 1
            assert newest(tmp_path).machine == leases[won.index(True)].machine


def test_a_full_disk_does_not_stop_the_count(folder: Path, start: Start) -> None:
    """Each count overwrites the last one: the file neither grows nor is emptied."""
    holds(start("one"))
    file = folder / "lease-1.json"
    counts = set()
    deadline = time.monotonic() + 60
    while len(counts) < 10:
        assert time.monotonic() < deadline
        content = file.read_bytes()
        assert len(content) == 512
        counts.add(json.loads(content)["count"])
        time.sleep(0.05)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"holder": "x"}'])
def test_a_lease_that_cannot_be_read_is_watched_like_any_other(tmp_path: Path, content: str) -> None:
    (tmp_path / "lease-1.json").write_text(content)
    begun = time.monotonic()
    with Lease(tmp_path, "two", beat=0.1, silence=0.5).held(patience=0):
        assert time.monotonic() - begun > 0.5


def test_files_that_only_look_like_leases_are_passed_over(tmp_path: Path) -> None:
    for name in ("lease-007.json", "lease-0.json", "lease-٣.json", f"lease-{10**30}.json"):
        (tmp_path / name).write_text("{}")
    assert newest(tmp_path) is None
    (tmp_path / "lease-20261123.json").write_text(json.dumps(RELEASED))
    begun = time.monotonic()
    with Lease(tmp_path).held(patience=0):
        assert newest(tmp_path).number == 20261124
    assert time.monotonic() - begun < 5
    assert not (tmp_path / "lease-20261123.json").exists()


RELEASED = {"holder": "a", "machine": "m", "token": "t", "count": 1, "released": True}
