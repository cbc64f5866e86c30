"""Programs that need not import torch, transformers and ms-swift: a process that has imported them forks for each.

That takes 6 s of processor time in each process of a training. The process (`python warm_programs.py PLACE OWNER`) has
only imported: it has no tensor, one thread, and nothing of this project, so each program reads the current code, with
its own environment. warm/sitecustomize.py hands the programs over. A test that is about kills, or about the environment
of such a process, starts it by itself (`fresh`).
"""

import atexit
import contextlib
import gc
import importlib
import io
import json
import logging
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

HELPERS = Path(__file__).parent
HANDING_OVER = HELPERS / "warm"

IMPORTED = (
    "torch.distributed.launcher.api",
    "torch.distributed.checkpoint",
    "torch.utils.tensorboard",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_vl.modeling_qwen3_vl",
    "deepspeed",
    "swift.pipelines.train.sft",
    "swift.template",
    "swift.tuners",
)

PROXIES = "VLMFLOW_PROXIES"
"""The variable with the folder in which a file, named by a program's process id, has that of the process that was
started in its place."""

LONGEST_START = 120.0
"""Seconds until the server answers."""


def start(place: Path) -> subprocess.Popen[bytes]:
    """Start the server. It answers at the socket `place` when that exists, and ends with this process at the latest."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "USE_HF": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    for name in ("PYTHONPATH", "VLMFLOW_WARM"):
        environment.pop(name, None)
    environment |= {"HF_DATASETS_CACHE": str(place.with_name("datasets")), "PYTHONSAFEPATH": "1"}
    return subprocess.Popen(
        [sys.executable, __file__, str(place), str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=place.with_suffix(".log").open("ab"),
        stderr=subprocess.STDOUT,
        cwd=place.parent,
        env=environment,
        start_new_session=True,
    )


def wait_for(place: Path) -> None:
    """Wait until the server answers."""
    began = time.monotonic()
    while not place.exists():
        assert time.monotonic() - began < LONGEST_START, place.with_suffix(".log").read_text()
        time.sleep(0.05)


@contextlib.contextmanager
def fresh() -> Iterator[None]:
    """Let each program that starts in this block start by itself."""
    place = os.environ.pop("VLMFLOW_WARM", None)
    try:
        yield
    finally:
        if place is not None:
            os.environ["VLMFLOW_WARM"] = place


def _serve(place: Path, owner: int) -> Callable[[], None] | None:
    """Fork for each call until the owner is gone; returns what to run in the fork, None at the end."""
    for name in IMPORTED:
        importlib.import_module(name)
    ours = [name for name in sys.modules if name.partition(".")[0] in ("vlmflow", "harness")]
    assert not ours, f"each program must import these itself: {ours}"
    assert len(list(Path("/proc/self/task").iterdir())) <= 2, "besides this thread only jemalloc's, which forks well"
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    (proxies := place.with_name("proxies")).mkdir(exist_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(place.with_suffix(".new")))
    listener.listen(64)
    place.with_suffix(".new").rename(place)
    events = selectors.DefaultSelector()
    events.register(listener, selectors.EVENT_READ)
    while Path(f"/proc/{owner}").exists():
        for key, _ in events.select(timeout=1.0):
            if key.fileobj is listener:
                caller, _ = listener.accept()
                size, files, _, _ = socket.recv_fds(caller, 4, 3)
                call = json.loads(_all_of(caller, int.from_bytes(size)))
                child = os.fork()
                if not child:
                    _let_go(events, caller)
                    return lambda: _become(call, files, proxies)
                (proxies / str(child)).write_text(str(call["process"]))
                for file in files:
                    os.close(file)
                ended = os.pidfd_open(child)
                events.register(caller, selectors.EVENT_READ, (child, None))
                events.register(ended, selectors.EVENT_READ, (child, caller))
            else:
                _attend(events, key, proxies)
    return None


def _all_of(caller: socket.socket, size: int) -> bytes:
    text = b""
    while len(text) < size:
        text += caller.recv(size - len(text))
    return text


def _attend(events: selectors.BaseSelector, key: selectors.SelectorKey, proxies: Path) -> None:
    """Pass a signal on to a program, kill one whose caller is gone, or tell the caller how it ended."""
    child, caller = key.data
    if caller is None:
        numbers = key.fileobj.recv(16)  # type: ignore[union-attr]
        for number in numbers or [signal.SIGKILL]:
            signal.pidfd_send_signal(_pidfd_of(events, child), number)
        if not numbers:
            events.unregister(key.fileobj)
        return
    events.unregister(key.fd)
    os.close(key.fd)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    (proxies / str(child)).unlink()
    with contextlib.suppress(KeyError):
        events.unregister(caller)
    with contextlib.suppress(OSError):
        caller.sendall(code.to_bytes(4, signed=True))
    caller.close()


def _pidfd_of(events: selectors.BaseSelector, child: int) -> int:
    (found,) = (key.fd for key in events.get_map().values() if key.data and key.data[0] == child and key.data[1])
    return found


def _let_go(events: selectors.BaseSelector, caller: socket.socket) -> None:
    """Close the server's files in a fork, by their objects, which would later close other files of the same numbers."""
    for key in list(events.get_map().values()):
        if isinstance(key.fileobj, socket.socket):
            key.fileobj.close()
        else:
            os.close(key.fd)
    events.close()
    caller.close()


def _become(call: dict[str, Any], files: list[int], proxies: Path) -> None:
    """Turn this fork into the process that was started in its place, and run the program to its end."""
    os.setsid()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(call["folder"])
    os.umask(call["mask"])
    os.environ.clear()
    os.environ.update(call["environment"])
    tempfile.tempdir = None  # read from TMPDIR again
    unbuffered = "PYTHONUNBUFFERED" in os.environ or "-u" in call["words"]
    for number, name in ((1, "stdout"), (2, "stderr")):
        raw = open(number, "wb", buffering=0 if unbuffered else -1, closefd=False)  # noqa: SIM115
        setattr(sys, name, io.TextIOWrapper(raw, write_through=unbuffered, line_buffering=name == "stderr"))
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    _as_if_imported_here()
    sys.orig_argv = call["words"]
    code = 0
    try:
        _run(proxies)
    except SystemExit as ended:
        code = _code_of(ended)
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _run(proxies: Path) -> None:
    place = os.environ.pop("VLMFLOW_WARM")  # this process hands nothing over, those that it starts do
    sys.path.insert(0, str(HANDING_OVER))
    name, *rest = importlib.import_module("sitecustomize").program(sys.orig_argv)
    os.environ["VLMFLOW_WARM"] = place
    is_script = name.endswith(".py")
    first = [] if "PYTHONSAFEPATH" in os.environ else [str(Path(name).parent) if is_script else os.getcwd()]
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [*first, *given, *sys.path[1:]]
    _know_ancestors(proxies)
    sys.argv = [name, *rest]
    if is_script:
        runpy.run_path(name, run_name="__main__")
    else:
        runpy.run_module(name, run_name="__main__", alter_sys=True)


def _code_of(ended: SystemExit) -> int:
    if isinstance(ended.code, int | None):
        return (ended.code or 0) & 0xFF
    print(ended.code, file=sys.stderr)
    return 1


def _as_if_imported_here() -> None:
    """Repeat what libraries do with the environment when they are imported."""
    import datasets
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    if "HF_DATASETS_CACHE" in os.environ:
        datasets.config.HF_DATASETS_CACHE = Path(os.environ["HF_DATASETS_CACHE"])
    if int(os.environ.get("LOCAL_RANK") or 0) > 0:
        logging.getLogger("swift").setLevel(logging.ERROR)


def _know_ancestors(proxies: Path) -> None:
    """Let the project's code see who started a program: it is the child of the process that stands for it."""

    def descends_from(ancestor: int) -> bool:
        one = os.getpid()
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            while one > 1:
                proxy = proxies / str(one)
                if proxy.exists():
                    one = int(proxy.read_text())
                one = int(Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()[1])
                if one == ancestor:
                    return True
        return False

    class Process:
        """Finds the module that asks, as Python does, and changes it."""

        @staticmethod
        def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
            if name != "vlmflow.core.process":
                return None
            spec = PathFinder.find_spec(name, path)
            assert spec is not None
            assert spec.loader is not None
            run = spec.loader.exec_module

            def run_and_change(module: Any) -> None:
                run(module)
                module.descends_from = descends_from

            spec.loader.exec_module = run_and_change  # type: ignore[method-assign]
            return spec

    sys.meta_path.insert(0, Process)


if __name__ == "__main__":
    program = _serve(Path(sys.argv[1]), int(sys.argv[2]))
    if program:
        program()
