"""Snakemake on tiny workflows whose targets are in storage."""

import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forked_snakemake import called
from workflow_runs import ROOT

SCRIPTS = ROOT / "scripts"

HEAD = f"""
import sys
sys.path.insert(0, {str(SCRIPTS)!r})
from vlmflow.harness import patches
from vlmflow.remote.storage import plugins
plugins.prepare(workflow)
patches.store_by(*plugins.OBJECTS)
"""
"""The part of the project's Snakefile before its first rule."""


@dataclass(frozen=True)
class StorageRun:
    """A workflow in `folder`, with targets under `targets` and the jobs' local files under `local`.

    provider: the storage plugin. variables: its environment variables.
    """

    folder: Path
    targets: Path | str
    local: Path
    rules: str
    provider: str = "fs"
    variables: tuple[tuple[str, str], ...] = ()

    def command(self, *words: str) -> list[str]:
        """Return Snakemake's command line."""
        (self.folder / "Snakefile").write_text(HEAD + self.rules)
        call = [sys.executable, "-m", "snakemake", "--cores", "2", "--directory", str(self.folder), "--nolock"]
        call += ["--snakefile", str(self.folder / "Snakefile"), "--rerun-triggers", "mtime", "params", "input"]
        call += ["--default-storage-provider", self.provider, "--default-storage-prefix", str(self.targets)]
        return [*call, "--shared-fs-usage", "none", "--local-storage-prefix", str(self.local), *words]

    def as_pod(self, rule: str, *words: str) -> list[str]:
        """Return the command line of one job, as the executor runs it in a pod."""
        options = ("--mode", "remote", "--target-jobs", f"{rule}:", "--force", "--keep-incomplete")
        return self.command(*options, *words, "--")

    def call(self, command: list[str], ends_well: bool = True) -> str:
        """Run a command line to its end and return its output.

        Raises AssertionError if it does not end as `ends_well` says.
        """
        done = called(command, **self.place())
        assert (done.returncode == 0) == ends_well, (done.stdout + done.stderr)[-6000:]
        return done.stdout + done.stderr

    def place(self) -> dict[str, Any]:
        """Return the working directory and environment of a call, for subprocess.

        The storage plugin copies with rsync, which here is a program that fails.
        """
        no_rsync = self.folder / "no-rsync" / "rsync"
        no_rsync.parent.mkdir(exist_ok=True)
        no_rsync.write_text("#!/bin/sh\nexit 99\n")
        no_rsync.chmod(0o755)
        own = {"VLMFLOW_POD": socket.gethostname(), "PATH": f"{no_rsync.parent}:{os.environ['PATH']}"}
        variables = own | dict(self.variables)
        return {"cwd": self.folder, "env": os.environ | variables}

    def run(self, *words: str) -> str:
        """Run the workflow to its end and return its output."""
        return self.call(self.command(*words))


@contextmanager
def other_file_system(folder: Path) -> Iterator[Path]:
    """Return a folder in memory, on another file system than `folder`."""
    other = Path(tempfile.mkdtemp(prefix="vlmflow-storage-", dir=Path("/", "dev", "shm")))
    try:
        assert other.stat().st_dev != folder.stat().st_dev
        yield other
    finally:
        shutil.rmtree(other)


def make_run(folder: Path, rules: str, local: Path | None = None) -> StorageRun:
    """Make the folders of a workflow. local: another folder for the jobs' local files."""
    local = (local or folder / "volume" / ".pods") / socket.gethostname()
    run = StorageRun(folder / "work", folder / "volume" / "run", local, rules)
    for place in (run.folder, run.targets):
        place.mkdir(parents=True)
    return run
