"""TensorBoard over all trainings, as `vlmflow board` starts it."""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from vlmflow.track.send import EventFolders
from workflow_runs import RUN, vlmflow

BOARD = vlmflow("board")


@contextmanager
def board(directory: Path, scratch: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Start it; yield its address and its process, which has ended afterwards. scratch: for its temporary files."""
    process = subprocess.Popen(
        [*BOARD, "--directory", directory],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": str(scratch)},
        text=True,
    )
    try:
        assert process.stdout
        line = next(line for line in process.stdout if line.startswith("TensorBoard: "))
        yield line.split()[1], process
    finally:
        process.kill()
        process.wait()


def asked(address: str, path: str) -> Any:
    return httpx.get(address + path, timeout=60).raise_for_status().json()


def shown(address: str, names: set[str]) -> dict[str, Any]:
    """Return the scalars by training, once TensorBoard shows those of these names."""
    give_up = time.monotonic() + 60
    while (tags := asked(address, "data/plugin/scalars/tags")).keys() != names and time.monotonic() < give_up:
        time.sleep(0.5)
    assert tags.keys() == names
    return tags


def test_all_trainings_are_shown_by_name_and_ctrl_c_ends_it(demo_run: Path, tmp_path: Path) -> None:
    runs = tmp_path / "stores" / "runs"
    shutil.copytree(demo_run / "stores" / "runs" / RUN, runs / RUN, ignore=shutil.ignore_patterns("checkpoint-*"))
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with board(tmp_path, scratch) as (address, process):
        assert address.startswith("http://127.0.0.1:")
        tags = shown(address, {f"{RUN}/smoke", f"{RUN}/full"})
        assert {"train/loss", "train/learning_rate", "eval/loss"} <= tags[f"{RUN}/full"].keys()
        points = asked(address, f"data/plugin/scalars/scalars?run={RUN}/full&tag=train/loss")
        assert [step for _, step, _ in points] == list(range(1, 10))
        shutil.copytree(next((runs / RUN).glob("full/*")), runs / RUN / "full" / "earlier")
        shown(address, {f"{RUN}/smoke", f"{RUN}/full", f"{RUN}/full-earlier"})
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        assert not list(scratch.glob("vlmflow-*")), "it leaves no links"


def test_a_port_in_use_and_a_missing_folder_are_refused(tmp_path: Path) -> None:
    def refused(*words: str | Path) -> str:
        done = subprocess.run([*BOARD, "--directory", tmp_path, *words], capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert "Traceback" not in done.stderr
        return done.stderr

    assert f"no training has begun: {tmp_path}/stores/runs does not exist" in refused()
    (tmp_path / "stores" / "runs").mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert f"{port}, it was already in use" in refused("--port", str(port))


def test_the_newest_training_has_the_short_name_and_keeps_it(tmp_path: Path) -> None:
    def trained(digest: str, at: int) -> Path:
        folder = tmp_path / "runs" / "mine" / "full" / digest / "checkpoints" / "runs"
        folder.mkdir(parents=True)
        file = folder / "events.out.tfevents.1.host.1.0"
        file.touch()
        os.utime(file, (at, at))
        return folder

    earlier, newest = trained("aaaa", 1), trained("bbbb", 2)
    (tmp_path / "links").mkdir()
    (tmp_path / "runs" / "mine" / "full" / "cccc" / "checkpoints" / "runs").mkdir(parents=True)
    trainings = EventFolders(tmp_path / "runs", tmp_path / "links")
    assert trainings.update() == ["mine/full", "mine/full-aaaa"]
    assert (tmp_path / "links/mine/full").resolve() == newest
    trained("dddd", 3)
    assert trainings.update() == ["mine/full-dddd"]
    shutil.rmtree(earlier.parents[1])
    assert trainings.update() == []
    assert {link.name for link in (tmp_path / "links/mine").iterdir()} == {"full", "full-dddd"}
