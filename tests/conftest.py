"""Finished runs, each made once for all tests that read it."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from hypothesis import settings

import session_folder
import warm_programs
from vlmflow.swift import child_process
from workflow_runs import ROOT, RUN, copy_folder, make_demo_folder, snakemake

# A shell starts background processes with these signals ignored, and our processes would inherit that; tests of Ctrl-C
# need them.
for number in (signal.SIGINT, signal.SIGQUIT):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

# A busy machine is not a fault of the code under test.
settings.register_profile("no deadline", deadline=None)
settings.register_profile("quick", deadline=None, max_examples=20)
settings.register_profile("deep", deadline=None, max_examples=2000)
settings.load_profile("no deadline")

# Two trainers and the tests share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Threads that wait for work would take the cores from other tests.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Logits of 150,000 tokens come and go; the kernel need not clear their memory each time (a sixth of a training's time).
for threshold in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"):
    os.environ.setdefault(threshold, str(1 << 30))


LIGHT = "VLMFLOW_TEST_LIGHT"
"""The variable that tells test processes to import nothing that takes seconds (run.py)."""

WITH_PROGRAMS = {
    "tests/stages/": (".venv", ".venv-track", ".venv-search"),
    "tests/workflow/": (".venv", ".venv-track", ".venv-search"),
    "tests/unit/search/": (".venv-search",),
    "tests/unit/lengths/test_steps.py": (".venv",),
}
"""Where tests start programs that may fork (warm_programs), and the environments of these."""

servers: list[subprocess.Popen[bytes]] = []


def pytest_configure(config: pytest.Config) -> None:
    """Make the session's folder, unless there is one."""
    if session_folder.VARIABLE not in os.environ:
        config.vlmflow_session = session_folder.make()


def pytest_unconfigure(config: pytest.Config) -> None:
    """End what the session started."""
    for server in servers:
        server.terminate()
        server.wait()
    if hasattr(config, "vlmflow_session"):
        shutil.rmtree(config.vlmflow_session, ignore_errors=True)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the servers of programs, if this process runs the tests itself, and keep a light one light."""
    if not hasattr(session.config, "workerinput") and not session.config.getoption("numprocesses", None):
        _start_servers(session.config, [item.nodeid for item in session.items])
    if LIGHT in os.environ and (heavy := {"nltk", "openai", "torch"} & sys.modules.keys()):
        raise pytest.UsageError(f"a test file imports {heavy}: import it in its tests, or name the file in run.HEAVY")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: Any, ids: list[str]) -> None:
    """Start the servers of programs when the first of several test processes says what it will run."""
    _start_servers(node.config, ids)


def _start_servers(config: pytest.Config, tests: Collection[str]) -> None:
    if servers or not hasattr(config, "vlmflow_session"):  # run.py has started them
        return
    starts = {start for start in WITH_PROGRAMS if any(test.startswith(start) for test in tests)}
    names = {name for start in starts for name in WITH_PROGRAMS[start]}
    for python in (ROOT / name / "bin" / "python" for name in sorted(names)):
        if python.exists():
            servers.append(warm_programs.start(config.vlmflow_session, python))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let one process fork the slow programs of a test, unless the test uses the fixture `fresh_programs`."""
    if item.nodeid.startswith(tuple(WITH_PROGRAMS)):
        folder = session_folder.folder()
        warm_programs.wait_for(folder)
        os.environ |= {"VLMFLOW_WARM": str(folder), "PYTHONPATH": warm_programs.WARM}
    else:
        os.environ.pop("VLMFLOW_WARM", None)
        os.environ["PYTHONPATH"] = warm_programs.OURS


@pytest.fixture
def fresh_programs() -> Iterator[None]:
    """Let each program of a test start by itself."""
    with warm_programs.fresh():
        yield


COSTLY = (
    *("test_kills.py", "test_stale.py", "test_hostile_model.py", "test_swapped_files.py"),
    *("test_trainer.py", "test_training_ends.py", "test_planted_trainings.py"),
)
"""The slowest test files. Of the first three, one begins without a finished run and each other makes another one."""

UNITS = (
    *("test_fetch_pictures.py", "test_search_steps.py", "test_download.py", "test_hostile_rows.py", "test_lease.py"),
    *("test_json_file.py", "test_cluster_controller.py", "test_storage_interleavings.py", "test_picture_ways.py"),
    *("test_harness.py", "test_gpu_share.py", "test_decode.py", "test_transport.py", "test_sampler.py"),
)
"""The slowest of the unit tests: in turn, those that mostly wait and those that use the cores meanwhile."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put slow files first and quick ones last, so that the test processes end together."""

    def place(item: pytest.Item) -> int:
        first = (*COSTLY, *UNITS)
        return first.index(item.path.name) if item.path.name in first else len(first) + ("unit" in item.path.parts)

    items.sort(key=place)


@pytest.fixture(scope="session")
def demo_run() -> Path:
    """Return a folder in which the demo ran from the sample to merged weights; nobody writes into it."""

    def demo(folder: Path) -> str:
        make_demo_folder(folder)
        return snakemake(folder, f"merged/{RUN}")

    return made_once("demo_run", demo)


@pytest.fixture(scope="session")
def text_run() -> Path:
    """Return a folder that `run_without_pictures` filled; nobody writes into it."""
    from text_run import run_without_pictures  # which imports torch

    return made_once("text_run", run_without_pictures)


@pytest.fixture(scope="session")
def fresh_demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a demo folder in which nothing has run."""
    return make_demo_folder(tmp_path_factory.mktemp("demo") / "fresh")


@pytest.fixture(scope="session")
def local_runs(fresh_demo: Path) -> tuple[Path, Path]:
    """Run on this machine what other tests run on clusters; returns the folders of `demo` and `here`."""
    from cluster.cluster_workflow import ONE_NODE, THREADS  # which imports what only these tests need

    folder = session_folder.folder()
    server = warm_programs.start(folder, Path(sys.executable))
    try:
        warm_programs.wait_for(folder)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("VLMFLOW_WARM", str(folder))
            patch.setenv("PYTHONPATH", warm_programs.WARM)
            demo = copy_folder(fresh_demo, fresh_demo.with_name("walked"))
            snakemake(demo, *THREADS, "--", f"merged/{RUN}")  # the number of threads changes the last bits of a sum
            here = copy_folder(demo, fresh_demo.with_name("here"))
            only = ["--allowed-rules", "train_model", "--forcerun", "train_model"]
            snakemake(here, "--config", ONE_NODE, *only, "--", f"checkpoints/{RUN}/full")
    finally:
        server.terminate()
        server.wait()
    return demo, here


def made_once(name: str, fill: Callable[[Path], str]) -> Path:
    """Return a folder that `fill` filled; the first test process fills it, the others wait.

    fill: takes the empty folder, and returns what Snakemake printed, which goes into `said.txt`.
    """
    folder = session_folder.folder() / name
    with FileLock(folder.with_suffix(".lock")):
        if not (folder / "said.txt").exists():
            folder.mkdir()
            (folder / "said.txt").write_text(fill(folder))
    return folder


@pytest.fixture(autouse=True, scope="session")
def measured_in_a_fork_or_here() -> Iterator[None]:
    """Let the estimate measure in this process where a fork cannot.

    PyTorch refuses a backward pass in a fork of a process that has made one; no stage does that before.
    """
    fork = child_process.limited

    def measured(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        found = fork(work)
        return work() if "Autograd-and-Fork" in str(found.get("failed")) else found

    child_process.limited = measured
    yield
    child_process.limited = fork
