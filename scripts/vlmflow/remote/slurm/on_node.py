"""What a job of Slurm sees on its nodes, printed as one line of JSON.

python -m vlmflow.remote.slurm.on_node first NAME HUB [FOLDER …]    on the first node: try what stages do there
python -m vlmflow.remote.slurm.on_node second NAME [FOLDER …]       what `first` starts on the second node, if any

NAME: a folder that is made in each FOLDER. HUB: an address that must answer; "" for none.
"""

import fcntl
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import msgspec

from vlmflow.remote.folder_trials import leave
from vlmflow.remote.slurm.queue import SlurmError, ask

ANSWER_SECONDS = 10
"""How long to wait for the hub, and for a signal."""

SECOND_SECONDS = 60
"""How long the program on the second node may take, which includes its start."""

PREFIX, SOCKET = "torch-shm-di", "manager.sock"
"""PyTorch's socket has the longest name of those that trainers make in the folder for temporary files. Tempfile adds 8
characters to PREFIX, which makes it as long as `torch-shm-dir-XXXXXX`."""


class SecondNode(msgspec.Struct, frozen=True):
    """What the second node sees. folders: the errors by folder, {} for none. signal: why none came, "" if one did."""

    node: str
    folders: dict[str, dict[str, str]]
    signal: str


class FirstNode(msgspec.Struct, frozen=True):
    """What the first node sees.

    python: its version. folders: the errors by trial, for each folder. temporary: the folder for temporary files, with
    its free MB, and what is wrong with it. shared_memory_mb: what is free in /dev/shm. hub: why it does not answer.
    second: the other node, or the same one if the job has one node. second_fault: why nothing ran there.
    """

    node: str
    user: int
    python: str
    folders: dict[str, dict[str, str]]
    temporary: str
    temporary_mb: int
    temporary_fault: str
    shared_memory_mb: int
    hub: str
    second: SecondNode | None
    second_fault: str


def first(name: str, hub: str, folders: list[str]) -> FirstNode:
    """Try the folders, and hold locks in them while the second node looks."""
    errors = {folder: leave(folder, name) for folder in folders}
    usable = [folder for folder in folders if not errors[folder]]
    other, fault = None, ""
    with ExitStack() as held:
        for folder in usable:
            lock = held.enter_context(Path(folder, name, "lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            other = _ask_second(name, usable)
        except (OSError, SlurmError, msgspec.DecodeError, subprocess.SubprocessError) as error:
            message = getattr(error, "stderr", None) or str(error)
            fault = " ".join(message.split())[-300:]
    for folder in folders:
        shutil.rmtree(Path(folder, name), ignore_errors=True)
    temporary = tempfile.gettempdir()
    return FirstNode(
        platform.node(),
        os.getuid(),
        platform.python_version(),
        errors,
        temporary,
        shutil.disk_usage(temporary).free // 10**6,
        no_socket(Path(temporary)),
        shutil.disk_usage("/dev/shm").free // 10**6 if Path("/dev/shm").is_dir() else 0,  # noqa: S108
        no_answer(hub) if hub else "",
        other,
        fault,
    )


def _ask_second(name: str, folders: list[str]) -> SecondNode:
    """Run this program on the job's last node: its second one, or its only one."""
    node = ask("scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]).split()[-1]
    srun = ["srun", "--nodes=1", "--ntasks=1", f"--nodelist={node}"]
    program = [sys.executable, "-m", "vlmflow.remote.slurm.on_node", "second", name, *folders]
    done = subprocess.run([*srun, *program], capture_output=True, text=True, check=True, timeout=SECOND_SECONDS)
    return msgspec.json.decode(done.stdout, type=SecondNode)


def second(name: str, folders: list[str]) -> SecondNode:
    """Look for what the first node left and holds, and let Slurm send this step a signal."""
    return SecondNode(platform.node(), {folder: look(Path(folder, name)) for folder in folders}, _no_signal())


def look(left: Path) -> dict[str, str]:
    """Return what is wrong with what the first node left in a folder, by trial; {} if nothing."""
    try:
        for file in ("file", "target/file", "symlink", "hard-link"):
            (left / file).read_text()
    except OSError as error:
        return {"see": str(error)}
    try:
        with (left / "lock").open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return {}
    except OSError as error:
        return {"flock": str(error)}
    return {"flock": "two nodes hold one lock"}


def _no_signal() -> str:
    came = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: came.set())
    try:
        # To its steps, not to its script.
        ask("scancel", "--signal=TERM", os.environ["SLURM_JOB_ID"])
    except SlurmError as error:
        return error.cause
    return "" if came.wait(ANSWER_SECONDS) else f"no signal came within {ANSWER_SECONDS} s"


def no_socket(temporary: Path) -> str:
    """Return why no socket can be made under the longest name that trainers give one; "" if it can."""
    try:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=temporary))
        try:
            with socket.socket(socket.AF_UNIX) as bound:
                bound.bind(str(folder / SOCKET))
        finally:
            shutil.rmtree(folder)
    except OSError as error:
        return str(error)
    return ""


def no_answer(address: str) -> str:
    """Return why an address does not answer; "" if it does, whatever it answers."""
    try:
        urllib.request.urlopen(address, timeout=ANSWER_SECONDS).close()  # noqa: S310 -- HF_ENDPOINT, or the hub's own
    except urllib.error.HTTPError:
        pass
    except (OSError, ValueError) as error:
        return str(error)
    return ""


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["first", name, hub, *folders]:
            seen: msgspec.Struct = first(name, hub, folders)
        case ["second", name, *folders]:
            seen = second(name, folders)
        case _:
            sys.exit(__doc__)
    print(msgspec.json.encode(seen).decode(), flush=True)
