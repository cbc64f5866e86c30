"""Processes that end with the one that started them."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from vlmflow import SCRIPTS

PR_SET_PDEATHSIG = 1
"""prctl(2), Linux: which signal the kernel sends to this process when the thread that started it ends."""


def die_with_parent(parent: int, signal_number: int = signal.SIGKILL) -> None:
    """Ask the kernel to send `signal_number` to this process when `parent` (a process id) ends.

    Call it in the child. If the parent has already ended, the child exits at once.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal_number)
    if os.getppid() != parent:
        sys.exit(f"process {parent}, which started this one, has ended")


def descends_from(ancestor: int) -> bool:
    """Return whether a process (id) is the parent of this one, or one above the parent."""
    process = os.getpid()
    with suppress(FileNotFoundError, ProcessLookupError):  # one of them has just ended
        while process > 1:
            process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
            if process == ancestor:
                return True
    return False


def bound_to_this_process(signal_number: int = signal.SIGKILL) -> Callable[[], None]:
    """Return a function for a child to call at its start (pool initializer, preexec_fn): it then ends with us."""
    parent = os.getpid()

    def bind() -> None:
        if signal_number != signal.SIGKILL:  # our handler would take a signal until the child has its own program
            signal.signal(signal_number, signal.SIG_DFL)
        die_with_parent(parent, signal_number)

    return bind


def import_path() -> str:
    """Return PYTHONPATH for a process of ours in another working directory: our modules, and no relative folder."""
    given = filter(os.path.isabs, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    return os.pathsep.join(dict.fromkeys([str(SCRIPTS), *given]))
