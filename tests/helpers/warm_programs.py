"""Lets the programs of tests skip the import of torch, transformers and ms-swift: one process forks for each program.

The imports would take 6 s of processor time in each process of a training. The process that forks has only imported: it
has no tensor, one thread, and nothing of this project, so each program reads current code, with its own environment.
warm/sitecustomize.py hands the programs over. A test that is about kills, or about the environment of such a process,
starts it by itself (`fresh`).

    python warm_programs.py PLACE OWNER
"""

import atexit
import contextlib
import fcntl
import gc
import importlib
import inspect
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
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from ctypes import CDLL
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

HELPERS = Path(__file__).parent
HANDING_OVER = HELPERS / "warm"

OURS = str(HELPERS.parents[1] / "scripts")
"""PYTHONPATH of programs that start by themselves: our modules."""

WARM = f"{OURS}{os.pathsep}{HANDING_OVER}"
"""PYTHONPATH of programs that may be handed over."""

IMPORTED = {
    ".venv": (
        "torch.distributed.launcher.api",
        "torch.distributed.checkpoint",
        "torch.utils.tensorboard",
        "transformers.models.qwen3.modeling_qwen3",
        "transformers.models.qwen3_vl.modeling_qwen3_vl",
        "transformers.cli.serve",
        "deepspeed",
        "swift.pipelines.train.sft",
        "swift.template",
        "swift.tuners",
    ),
    ".venv-track": ("mlflow", "alembic.util.exc"),
    ".venv-search": ("optuna", "optuna.importance", "optuna.storages.journal"),
}
"""What the programs of an environment import, by its folder."""

MOST_FILES = 16
"""Files that a program may inherit: its standard streams, and a connection to its parent."""

LONGEST_START = 120.0
"""Seconds until the server answers."""


def start(folder: Path, python: Path) -> subprocess.Popen[bytes]:
    """Start the server of an environment. It ends with this process at the latest.

    folder: it answers at a socket there, with the name of the environment's folder, when that exists (`wait_for`).
    """
    place = folder / python.parents[1].name
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "USE_HF": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    # The kernel need not clear the memory of large tensors each time (conftest.py).
    environment |= dict.fromkeys(("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"), str(1 << 30))
    for name in ("PYTHONPATH", "VLMFLOW_WARM"):
        environment.pop(name, None)
    environment |= {"HF_DATASETS_CACHE": str(folder / "datasets"), "PYTHONSAFEPATH": "1"}
    return subprocess.Popen(
        [str(python), __file__, str(place), str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=_log_of(place).open("ab"),
        stderr=subprocess.STDOUT,
        cwd=folder,
        env=environment,
        start_new_session=True,
    )


def wait_for(folder: Path) -> None:
    """Wait until the servers answer that are started there."""
    began = time.monotonic()
    while missing := [log for log in folder.glob("*.log") if not log.with_suffix("").exists()]:
        ended = any(log.with_suffix(".ended").exists() for log in missing) or time.monotonic() - began > LONGEST_START
        assert not ended, "\n".join(log.read_text() for log in missing)
        time.sleep(0.05)


def _log_of(place: Path) -> Path:
    return place.with_name(f"{place.name}.log")


@contextlib.contextmanager
def fresh() -> Iterator[None]:
    """Let each program that starts in this block start by itself."""
    before = {name: os.environ[name] for name in ("VLMFLOW_WARM", "PYTHONPATH") if name in os.environ}
    os.environ.pop("VLMFLOW_WARM", None)
    os.environ["PYTHONPATH"] = OURS
    try:
        yield
    finally:
        os.environ |= before


@contextlib.contextmanager
def fresh_torchrun() -> Iterator[None]:
    """Let torchrun start by itself in this block, but not its ranks: its children are those who are told to end."""
    os.environ["VLMFLOW_FRESH"] = "torch.distributed.run"
    try:
        yield
    finally:
        del os.environ["VLMFLOW_FRESH"]


def _serve(place: Path, owner: int) -> Callable[[], None] | None:
    """Fork for each call until the owner is gone; returns what to run in the fork, None at the end.

    A file in the folder `proxies`, named by a program's process id, has that of the process that stands for it.
    """
    for name in IMPORTED[place.name]:
        importlib.import_module(name)
    ours = [name for name in sys.modules if name.partition(".")[0] in ("vlmflow", "harness")]
    assert not ours, f"each program must import these itself: {ours}"
    assert len(list(Path("/proc/self/task").iterdir())) <= 2, "besides this thread only jemalloc's, which forks well"
    inspect.stack()  # it keeps the files of all modules
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    (proxies := place.with_name(f"{place.name}-proxies")).mkdir()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{place}.new")
    listener.listen(64)
    Path(f"{place}.new").rename(place)
    events = selectors.DefaultSelector()
    events.register(listener, selectors.EVENT_READ)
    while Path(f"/proc/{owner}").exists():
        for key, _ in events.select(timeout=1.0):
            if key.fileobj is listener:
                caller, _ = listener.accept()
                files: list[int] = []
                try:
                    size, files, _, _ = socket.recv_fds(caller, 4, MOST_FILES)
                    call = json.loads(_all_of(caller, int.from_bytes(size)))
                    print(*call["words"], flush=True)
                except (OSError, ValueError, KeyError, TypeError):  # killed as it called; or no caller of ours
                    call = None
                signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
                child = -1 if call is None else os.fork()
                if not child:
                    _let_go(events, caller)
                    return lambda: _become(call, files, proxies)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
                for file in files:
                    os.close(file)
                if call is None:
                    caller.close()
                    continue
                ended = os.pidfd_open(child)
                events.register(caller, selectors.EVENT_READ, (child, None))
                events.register(ended, selectors.EVENT_READ, (child, caller))
            else:
                _attend(events, key, proxies)
    return None


def _all_of(caller: socket.socket, size: int) -> bytes:
    text = b""
    while len(text) < size:
        if not (more := caller.recv(size - len(text))):
            raise ConnectionError
        text += more
    return text


def _attend(events: selectors.BaseSelector, key: selectors.SelectorKey, proxies: Path) -> None:
    """Pass a signal on to a program, kill one whose caller is gone, or tell the caller how it ended."""
    if events.get_map().get(key.fd) is not key:  # its program has ended in the same moment
        return
    child, caller = key.data
    if caller is None:
        numbers = key.fileobj.recv(16)  # type: ignore[union-attr]
        for number in numbers or [signal.SIGKILL]:
            with contextlib.suppress(OSError):  # no such signal, or it has ended
                signal.pidfd_send_signal(_pidfd_of(events, child), number)
        if not numbers:
            events.unregister(key.fileobj)
        return
    events.unregister(key.fd)
    os.close(key.fd)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    (proxies / str(child)).unlink(missing_ok=True)
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
    (proxies / str(os.getpid())).write_text(str(call["process"]))
    apart = [fcntl.fcntl(file, fcntl.F_DUPFD, 1_000) for file in files]
    for file in files:
        os.close(file)
    for number, file in zip(call["files"], apart, strict=True):
        os.dup2(file, number)
        os.close(file)
    CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with the server
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    os.chdir(call["folder"])
    os.umask(call["mask"])
    os.environ.clear()
    os.environ.update(call["environment"])
    tempfile.tempdir = None  # read from TMPDIR again
    unbuffered = "PYTHONUNBUFFERED" in os.environ or "-u" in call["words"]
    for number, name, errors in ((1, "stdout", "strict"), (2, "stderr", "backslashreplace")):
        raw = open(number, "wb", buffering=0 if unbuffered else -1, closefd=False)  # noqa: SIM115
        line_buffering = name == "stderr"
        text = io.TextIOWrapper(raw, errors=errors, write_through=unbuffered, line_buffering=line_buffering)
        setattr(sys, name, text)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    _as_if_imported_here()
    # Where torchrun notes an event, `inspect.stack` searches all modules for the file of each frame that has none here.
    inspect.modulesbyfile |= {os.path.abspath(file): "runpy" for file in ("<frozen runpy>", __file__)}
    sys.orig_argv = call["words"]
    code = 0
    try:
        _run(proxies)
    except SystemExit as ended:
        code = _code_of(ended)
    except BaseException as error:
        traceback.print_exc()
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    with contextlib.suppress(KeyboardInterrupt):  # as in Python, this ends the wait
        threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _run(proxies: Path) -> None:
    place = os.environ.pop("VLMFLOW_WARM")  # this process hands nothing over, those that it starts do
    sys.path.insert(0, str(HANDING_OVER))
    name, *rest = importlib.import_module("sitecustomize").program(sys.orig_argv)
    os.environ["VLMFLOW_WARM"] = place
    is_module, is_code = "-m" in sys.orig_argv[:4], "-c" in sys.orig_argv[:4]
    first = [] if "PYTHONSAFEPATH" in os.environ else [os.getcwd() if is_module or is_code else str(Path(name).parent)]
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [*first, *given, *sys.path[1:]]
    _know_ancestors(proxies)
    sys.argv = ["-c" if is_code else name, *rest]
    if is_module:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    elif is_code:
        exec(name, vars(sys.modules["__main__"]))  # noqa: S102
    else:
        runpy.run_path(name, run_name="__main__")


def _code_of(ended: SystemExit) -> int:
    if isinstance(ended.code, int | None):
        return (ended.code or 0) & 0xFF
    print(ended.code, file=sys.stderr)
    return 1


def _as_if_imported_here() -> None:
    """Repeat what libraries do with the environment when they are imported."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    if (datasets := sys.modules.get("datasets")) and "HF_DATASETS_CACHE" in os.environ:
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
            if name != "vlmflow.core.processes":
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
    server = os.getpid()
    try:
        program = _serve(Path(sys.argv[1]), int(sys.argv[2]))
    finally:
        if os.getpid() == server:
            Path(f"{sys.argv[1]}.ended").touch()
    if program:
        program()
