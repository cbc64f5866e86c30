"""A folder that all processes of one run of the tests share: finished runs, and the sockets of warm programs."""

import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

VARIABLE = "VLMFLOW_TEST_SESSION"
"""The variable with the folder; run.py or the first test process makes it."""

PREFIX = "vlmflow-tests-"
LEFT_AFTER = 24 * 3600


def make() -> Path:
    """Make the folder, and remove those that killed runs left a day ago."""
    for left in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(FileNotFoundError):  # another run has just ended
            if time.time() - left.stat().st_mtime > LEFT_AFTER:
                shutil.rmtree(left, ignore_errors=True)
    os.environ[VARIABLE] = tempfile.mkdtemp(prefix=PREFIX)
    return folder()


def folder() -> Path:
    """Return the folder."""
    return Path(os.environ[VARIABLE])
