"""Finished runs, each made once for all tests that read it."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import pytest
from filelock import FileLock
from hypothesis import settings

import warm_programs
from workflow_runs import ROOT, RUN, make_demo_folder, snakemake

# A shell starts background processes with these signals ignored, and our processes would inherit that; tests of Ctrl-C
# need them.
for number in (signal.SIGINT, signal.SIGQUIT):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

# A busy machine is not a fault of the code under test.
settings.register_profile("no deadline", deadline=None)
settings.register_profile("deep", deadline=None, max_examples=2000)
settings.load_profile("no deadline")

# Two trainers and the tests share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Threads that wait for work would take the cores from other tests.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Logits of 150,000 tokens come and go; the kernel need not clear their memory each time (a sixth of a training's time).
for threshold in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"):
    os.environ.setdefault(threshold, str(1 << 30))


SESSION = "VLMFLOW_TEST_SESSION"
"""The variable with a folder of all test processes together."""


WITH_PROGRAMS = ("tests/stages/", "tests/workflow/")
"""Where tests start programs that may fork (warm_programs)."""

servers: list[subprocess.Popen[bytes]] = []


def pytest_configure(config: pytest.Config) -> None:
    """Make the session's folder, in the process that starts the others."""
    if not hasattr(config, "workerinput"):
        os.environ[SESSION] = tempfile.mkdtemp(prefix="vlmflow-tests-")


def pytest_unconfigure(config: pytest.Config) -> None:
    """End what the session started."""
    for server in servers:
        server.terminate()
        server.wait()
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ[SESSION], ignore_errors=True)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the servers of programs, if this process runs the tests itself."""
    if not hasattr(session.config, "workerinput") and not session.config.getoption("numprocesses", None):
        _start_servers([item.nodeid for item in session.items])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(ids: list[str]) -> None:
    """Start the servers of programs when the first of several test processes says what it will run."""
    _start_servers(ids)


def _start_servers(tests: Collection[str]) -> None:
    heavy = [test for test in tests if test.startswith(WITH_PROGRAMS)]
    if heavy and not servers:
        servers.append(warm_programs.start(Path(os.environ[SESSION]), Path(sys.executable)))
        track = ROOT / ".venv-track" / "bin" / "python"
        if any("track" in test for test in heavy) and track.exists():
            servers.append(warm_programs.start(Path(os.environ[SESSION]), track))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let the heavy programs of a test be forks of one process; but see the fixture `fresh_programs`."""
    if item.nodeid.startswith(WITH_PROGRAMS):
        warm_programs.wait_for(Path(os.environ[SESSION]))
        os.environ |= {"VLMFLOW_WARM": os.environ[SESSION], "PYTHONPATH": str(warm_programs.HANDING_OVER)}
    else:
        for name in ("VLMFLOW_WARM", "PYTHONPATH"):
            os.environ.pop(name, None)


@pytest.fixture
def fresh_programs() -> Iterator[None]:
    """Let each program of a test start by itself."""
    with warm_programs.fresh():
        yield


COSTLY = (
    *("test_kills.py", "test_stale.py", "test_hostile_model.py", "test_swapped_files.py"),
    *("test_trainer.py", "test_training_ends.py", "test_planted_feedback.py"),
)
"""The slowest test files. Of the first three, one begins without a finished run and each other makes another one."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put slow files first and quick ones last, so that the test processes end together."""

    def place(item: pytest.Item) -> int:
        if item.path.name in COSTLY:
            return COSTLY.index(item.path.name)
        return len(COSTLY) + ("unit" in item.path.parts)

    items.sort(key=place)


@pytest.fixture(scope="session")
def demo_run(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """Return a folder in which the demo ran from the sample to merged weights; nobody writes into it."""

    def demo(folder: Path) -> str:
        make_demo_folder(folder)
        return snakemake(folder, f"merged/{RUN}")

    return made_once("demo_run", demo, tmp_path_factory, worker_id)


@pytest.fixture(scope="session")
def text_run(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """Return a folder that `run_without_pictures` filled; nobody writes into it."""
    from text_run import run_without_pictures  # which imports torch

    return made_once("text_run", run_without_pictures, tmp_path_factory, worker_id)


@pytest.fixture(scope="session")
def planted_runs(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """Return a folder that `train_on_planted_feedback` filled; nobody writes into it."""
    from planted_feedback import train_on_planted_feedback

    return made_once("planted_runs", train_on_planted_feedback, tmp_path_factory, worker_id)


def made_once(name: str, fill: Callable[[Path], str], tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """Return a folder that `fill` filled; the first test process fills it, the others wait.

    fill: takes the empty folder, and returns what Snakemake printed, which goes into `said.txt`.
    """
    shared = tmp_path_factory.getbasetemp()
    folder = (shared if worker_id == "master" else shared.parent) / name
    with FileLock(folder.with_suffix(".lock")):
        if not (folder / "said.txt").exists():
            folder.mkdir()
            (folder / "said.txt").write_text(fill(folder))
    return folder
