"""Anonymous memory (RssAnon) of a process and its children, which excludes mapped files."""

import re
import subprocess
import time
from pathlib import Path

INTERVAL = 0.05


def peak_anonymous(process: subprocess.Popen, interval: float = INTERVAL) -> int:
    """Watch a running process until it ends; return the peak in bytes.

    interval: seconds between two samples.

    A page that a fork shares with its parent counts in both, so the figure is never too small.
    """
    peak = 0
    while process.poll() is None:
        peak = max(peak, anonymous(process.pid))
        time.sleep(interval)
    return peak


def anonymous(process: int) -> int:
    """Return the current anonymous memory of a process and its children, in bytes; 0 if it has ended."""
    here = Path(f"/proc/{process}")
    try:
        found = re.search(r"RssAnon:\s+(\d+) kB", (here / "status").read_text())
        # A child is listed under the thread that made it.
        children = [child for task in (here / "task").iterdir() for child in (task / "children").read_text().split()]
    except OSError:
        return 0
    return (int(found[1]) * 1024 if found else 0) + sum(anonymous(int(child)) for child in children)
