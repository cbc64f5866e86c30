"""Says which jobs run here when nothing has said anything for most of a minute: a stage may compute for long."""

import os
import sys
import threading
import time
from contextlib import suppress
from typing import Any

from snakemake.logging import logger

SILENCE = 45.0
"""Seconds. A terminal's time lags by up to 8, and no minute shall pass without a line."""


def watch(workflow: Any) -> None:
    """Start a thread that ends with this process. Call it before the first job."""
    threading.Thread(target=_watch, args=(workflow,), daemon=True).start()


def _watch(workflow: Any) -> None:
    said = time.time()
    while True:
        time.sleep(max(said + SILENCE - time.time(), 1))
        said = max(said, _last_line())
        with suppress(Exception):  # a line that cannot be made is no reason to show a traceback
            running = list(workflow.scheduler.running)
            if running and time.time() - said >= SILENCE:
                logger.info(f"still running: {'; '.join(sorted(map(_named, running)))}")
                said = time.time()


def _last_line() -> float:
    """Return when this process or a stage last wrote to standard error, in seconds since 1970; 0 if nothing tells it.

    A file and a terminal do; the pipes of a newer Linux do not, so that there the line comes beside a stage's own.
    """
    try:
        return os.fstat(sys.stderr.fileno()).st_mtime
    except (OSError, ValueError):
        return 0.0


def _named(job: Any) -> str:
    return f"{job.message or job.rule.name}{''.join(f' ({log})' for log in job.log[:1])}"
