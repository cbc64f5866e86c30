"""Snakemake on tiny workflows whose targets lie in storage, for tests."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

SCRIPTS = Path(__file__).parents[1] / "scripts"

HEAD = f"""
import sys
sys.path.insert(0, {str(SCRIPTS)!r})
from harness.storage import whole_targets
whole_targets.install(workflow)
"""
"""What the project's Snakefile does before its first rule."""


@dataclass(frozen=True)
class StorageRun:
    """A workflow in `folder`, with targets below `targets` and the jobs' local files below `local`."""

    folder: Path
    targets: Path
    local: Path
    rules: str

    def command(self, *words: str) -> list[str]:
        """Give Snakemake's command line."""
        (self.folder / "Snakefile").write_text(HEAD + self.rules)
        call = [sys.executable, "-m", "snakemake", "--cores", "2", "--directory", str(self.folder), "--nolock"]
        call += ["--snakefile", str(self.folder / "Snakefile"), "--rerun-triggers", "mtime", "params", "input"]
        call += ["--default-storage-provider", "fs", "--default-storage-prefix", str(self.targets)]
        return [*call, "--shared-fs-usage", "none", "--local-storage-prefix", str(self.local), *words]

    def as_pod(self, rule: str, *words: str) -> list[str]:
        """Give the command line of one job, as an executor calls it in a pod."""
        return self.command("--mode", "remote", "--target-jobs", f"{rule}:", "--force", *words, "--")

    def call(self, command: list[str]) -> str:
        """Run a command line to its end and give what it said.

        Raises AssertionError with the output where it fails.
        """
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"COLUMNS": "200"})
        assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
        return done.stdout + done.stderr

    def run(self, *words: str) -> str:
        """Run the workflow to its end and give what it said."""
        return self.call(self.command(*words))


def make_run(folder: Path, rules: str, local: Path | None = None) -> StorageRun:
    """Make the folders of a workflow. local: another place for the jobs' local files, not beside the targets."""
    run = StorageRun(folder / "work", folder / "volume" / "run", local or folder / "volume" / ".pods" / "here", rules)
    for place in (run.folder, run.targets):
        place.mkdir(parents=True)
    return run
