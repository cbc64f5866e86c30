"""What a test needs of the machine: Debian's packages, and the end of a test that goes without."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

import pytest
from filelock import FileLock


def lacking(reason: str) -> NoReturn:
    """Skip the test, whose needs this machine lacks; under CI it fails."""
    (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)


def is_debian() -> bool:
    """Return whether this machine runs Debian."""
    release = Path("/etc/os-release")
    return release.exists() and "ID=debian" in release.read_text().splitlines()


def install(programs: Mapping[str, str], log: Path) -> None:
    """Install the packages (the values) whose programs (the keys) are missing, and extend PATH to where they are.

    log: a file that gets apt-get's output. Raises subprocess.CalledProcessError if it fails.
    """
    os.environ["PATH"] = path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    # Tests run in parallel, and apt-get fails at once if another one is running.
    with FileLock(Path(tempfile.gettempdir()) / "vlmflow-apt.lock"):
        missing = sorted({package for program, package in programs.items() if not shutil.which(program, path=path)})
        if not missing:
            return
        quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a") as out:
            for words in (["update"], ["install", "--yes", "--no-install-recommends", *missing]):
                subprocess.run(["apt-get", *words], stdout=out, stderr=out, env=quiet, check=True)
