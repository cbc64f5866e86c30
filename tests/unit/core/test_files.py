import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from vlmflow.core import files, progress
from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import locked, read_json, require_free_disk, unfinished, whole_file, whole_folder, write_json
from vlmflow.core.processes import SLOT_BYTES, ordered_map
from vlmflow.core.progress import LOG_INTERVAL, Progress, amount, clock
from workflow_runs import ROOT

SCRIPTS = str(ROOT / "scripts")


def test_a_file_gets_its_name_only_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "a" / "file"
    with pytest.raises(ZeroDivisionError), whole_file(path) as file:
        file.write(b"half" * (1 // 0))
    assert not path.exists()
    with whole_file(path) as file:
        file.write(b"whole")
        assert not path.exists()
    assert path.read_bytes() == b"whole"
    assert not unfinished(path).exists()


def test_a_folder_gets_its_name_only_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    with pytest.raises(ZeroDivisionError), whole_folder(path) as folder:
        (folder / "old").write_bytes(b"half" * (1 // 0))
    assert not path.exists()
    for name in ("new", "newer"):
        with whole_folder(path) as folder:
            (folder / name).touch()
    assert [file.name for file in path.iterdir()] == ["newer"]


def test_json_that_is_none_names_its_file(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"ü": [1, None]})
    assert read_json(tmp_path / "a.json") == {"ü": [1, None]}
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(VlmflowError, match=r"a\.json"):
        read_json(tmp_path / "a.json")


def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.json")
    with pytest.raises(VlmflowError, match=r"a\.json: is not a file"):
        read_json(tmp_path / "a.json")


def test_work_that_does_not_fit_on_the_disk_is_not_started(tmp_path: Path) -> None:
    require_free_disk(tmp_path / "not" / "yet" / "there", 1, "nothing much")
    with pytest.raises(VlmflowError, match=r"merging needs 1000000000.00 GB, only [\d.]+ GB is free"):
        require_free_disk(tmp_path / "not" / "yet", 10**18, "merging")


@pytest.mark.parametrize("processes", [1, 3])
def test_results_come_in_the_order_of_the_items(processes: int) -> None:
    """The function may be a closure; it is inherited, not pickled."""
    offset = 100

    def slow_when_even(item: int) -> int:
        time.sleep(0.01 * (item % 2 == 0))
        return item + offset

    assert list(ordered_map(slow_when_even, range(40), processes)) == list(range(100, 140))


@pytest.mark.parametrize("size", [0, SLOT_BYTES - 100, SLOT_BYTES, 3 * SLOT_BYTES])
def test_results_of_any_size_are_complete(size: int) -> None:
    results = ordered_map(lambda item: bytes([item]) * size, range(20), 2)
    assert all(result == bytes([item]) * size for item, result in enumerate(results))


@pytest.mark.parametrize("kind", [whole_file, whole_folder])
def test_two_writers_of_one_name_do_not_mix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Callable[[Path], Any]
) -> None:
    monkeypatch.setattr(files, "PATIENCE", 0.3)
    with (
        kind(tmp_path / "name"),
        pytest.raises(VlmflowError, match="another process is writing it"),
        kind(tmp_path / "name"),
    ):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["name"]


def test_items_are_taken_no_faster_than_results() -> None:
    """Memory is bounded, however many items there are."""
    taken = []
    results = ordered_map(abs, (taken.append(number) or number for number in range(1000)), 2)
    next(results)
    assert len(taken) <= 10
    results.close()


def test_a_killed_worker_is_an_error_with_a_next_step() -> None:
    with pytest.raises(VlmflowError, match="a worker process was killed"):
        list(ordered_map(lambda item: os.kill(os.getpid(), signal.SIGKILL), range(4), 2))


def test_workers_end_with_a_killed_parent() -> None:
    """No orphan is left when a stage is killed."""
    program = (
        "import os, sys, time; from vlmflow.core.processes import ordered_map\n"
        "def work(item): print(os.getpid(), flush=True); time.sleep(60)\n"
        "list(ordered_map(work, range(2), 2))\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env={"PYTHONPATH": SCRIPTS}
    ) as parent:
        workers = [int(parent.stdout.readline()) for _ in range(2)]
        parent.kill()
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{worker}").exists() for worker in workers):
        assert time.monotonic() < deadline, "a worker outlived its parent"
        time.sleep(0.02)


def test_a_long_stage_reports_its_end_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Formerly the last unit and the end of the block each showed it."""
    with Progress("the check", 2, "rows") as progress:
        for _ in range(2):
            progress._shown -= LOG_INTERVAL
            progress.advance()
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" · ")[0] for line in lines] == ["the check: 1 of 2 rows", "the check: 2 of 2 rows"]


def test_progress_shows_count_rate_and_time_left() -> None:
    progress = Progress("resolve_images fire/train", 81_000, "pictures")
    progress.start_at(1_000)
    progress.count = 11_000
    assert progress.line(10.0) == "resolve_images fire/train: 11,000 of 81,000 pictures · 1,000 pictures/s · 1:10 left"


def test_amounts_and_durations_are_written_for_people() -> None:
    assert amount(12_345_678, "bytes") == "12.3 MB"
    assert amount(0.5, "rows") == "0.5 rows"
    assert [clock(seconds) for seconds in (5, 65, 3_725)] == ["0:05", "1:05", "1:02:05"]


def test_long_work_says_that_it_goes_on(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SILENCE", 0.01)
    with progress.lines_meanwhile("the comparison"):
        time.sleep(0.2)
    said = capsys.readouterr().err.splitlines()
    assert len(said) > 1
    assert set(said) == {"the comparison: running for 0:00"}
    time.sleep(0.05)
    assert not capsys.readouterr().err, "it ends with the work"


def test_who_waits_for_a_lock_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "vlmflow")
    lock = tmp_path / "a" / "x.lock"
    order = []

    def other() -> None:
        with locked(lock, "another has it; waiting"):
            order.append("the other")

    with ThreadPoolExecutor(1) as pool:
        with locked(lock, "free, so never said"):
            waiting = pool.submit(other)
            while not caplog.messages:
                assert not waiting.done()
                time.sleep(0.01)
            order.append("the first")
        waiting.result(60)
    assert caplog.messages == ["another has it; waiting"]
    assert order == ["the first", "the other"]
