"""Processes that outlive the command that started them, and are ended only by their own id."""

import contextlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path

from cluster.paths import STATE


def children(pid: int) -> list[int]:
    """Return the ids of a process's children (proc(5): the fourth field of stat is the parent)."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(stat.parent.name))
    return found


def _birth(pid: int) -> str | None:
    """Return the tick at which a process started, None if it is gone or a zombie: an id alone may be reused."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]


def _record(name: str) -> Path:
    return STATE / "processes" / f"{name}.json"


def log_of(name: str) -> Path:
    """Return the file to which a process started by spawn writes."""
    return STATE / "logs" / f"{name}.log"


def spawn(name: str, argv: list[object], env: dict[str, str] | None = None) -> int:
    """Start a process that writes to log_of(name) and is known by its name from then on; give its id."""
    log = log_of(name)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        process = subprocess.Popen(
            [str(word) for word in argv],
            stdout=out,
            stderr=out,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
            env={**os.environ, **(env or {})},
        )
    _record(name).parent.mkdir(exist_ok=True)
    _record(name).write_text(json.dumps({"pid": process.pid, "birth": _birth(process.pid)}))
    return process.pid


def pid_of(name: str) -> int | None:
    """Return the id of a process started by spawn, None if it has ended."""
    try:
        known = json.loads(_record(name).read_text())
    except FileNotFoundError:
        return None
    return known["pid"] if known["birth"] and _birth(known["pid"]) == known["birth"] else None


def stop(name: str, number: int = signal.SIGTERM, limit: float = 15.0) -> None:
    """End a process started by spawn, by SIGKILL if it is still there after limit seconds.

    A process started in a node's namespaces is the child of the nsenter that spawn started: the child gets the signal.
    """
    pid = pid_of(name)
    if pid is None:
        return
    targets = children(pid) or [pid]
    end = time.monotonic() + limit
    for target in targets:
        with contextlib.suppress(ProcessLookupError):
            os.kill(target, number)
    while pid_of(name) is not None:
        if time.monotonic() > end:
            for target in [*targets, pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(target, signal.SIGKILL)
            end += limit
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
        time.sleep(0.02)
    _record(name).unlink(missing_ok=True)
