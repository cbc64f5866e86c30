"""Work on what a model's owner wrote, in a child process with limits of memory and time."""

import json
import multiprocessing
import os
import resource
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from vlmflow.core.process import bound_to_this_process

MEMORY = 1 << 30
"""Bytes that the child may have more than this process."""

SECONDS = 60
"""Processor time that the child may take; it takes a few milliseconds per row, and a second for the largest model."""

WAIT = 20 * SECONDS
"""Seconds until a child that computes nothing is given up; on a busy machine it may wait for long."""

TOO_MUCH = {"failed": f"more than {MEMORY / 1e9:.1f} GB of memory"}

MOST_CHARS = 500
"""Characters that are kept of an error."""


def limited(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what `work` returns, JSON values, from a fork of this process: it must start no threads.

    Returns {"failed": why} if it raises anything, or goes beyond a limit.
    """
    context = multiprocessing.get_context("fork")  # the libraries are loaded
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_work, args=(bound_to_this_process(), sender, work))
    child.start()
    sender.close()
    try:
        if not receiver.poll(WAIT):
            return {"failed": f"not done after {WAIT} s"}
        found: dict[str, Any] = json.loads(receiver.recv_bytes())
        return found
    except EOFError:
        child.join()
        if child.exitcode == -signal.SIGXCPU:
            return {"failed": f"not done after {SECONDS} s of processor time"}
        if child.exitcode in (0, 1):  # Python's own end, without a word: not even its error could be told
            return TOO_MUCH
        return {"failed": f"its process ended with code {child.exitcode}"}
    finally:
        child.kill()
        child.join()


def failure(error: Exception) -> dict[str, Any]:
    """Return an error as the result of work."""
    return {"failed": f"{type(error).__name__}: {error}"[:MOST_CHARS]}


def _work(bind: Callable[[], None], sender: Connection, work: Callable[[], dict[str, Any]]) -> None:
    bind()
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 5))
    try:
        found = work()
    except Exception as error:  # whatever their text does; PyTorch raises a RuntimeError where its C++ has no memory
        found = TOO_MUCH if isinstance(error, MemoryError) or "bad_alloc" in str(error) else failure(error)
    sender.send_bytes(json.dumps(found).encode())
