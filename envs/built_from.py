"""What a wheel has that a clone has not: hatchling calls it at the build (pyproject.toml)."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NAME = "built_from.txt"
"""In an sdist at the top; in the package beside the Snakefile (`vlmflow.merging.proof.git_commit` reads it)."""


class BuiltFrom(BuildHookInterface):
    """Adds the commit, for provenance, and the package's second `__init__.py` (see there)."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add them to a wheel, also to one that is built from an sdist; that has the commit. A clone needs neither."""
        if version == "editable":
            return
        root, added = Path(self.root), build_data["force_include"]
        scratch = Path(self.directory) / "scratch"
        scratch.mkdir(parents=True, exist_ok=True)
        if not (file := root / NAME).is_file():
            call = ["git", "-C", str(root), "describe", "--always", "--dirty=+changes", "--abbrev=40", "--exclude=*"]
            file = scratch / NAME
            file.write_text(subprocess.run(call, capture_output=True, text=True, check=True).stdout)
        if self.target_name == "sdist":
            added[str(file)] = NAME
            return
        added[str(file)] = f"vlmflow/workflow/{NAME}"
        again = scratch / "again.py"  # under its own name hatchling would take it only once
        shutil.copyfile(root / "scripts/vlmflow/__init__.py", again)
        added[str(again)] = "vlmflow/workflow/scripts/vlmflow/__init__.py"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was written for it."""
        shutil.rmtree(Path(self.directory) / "scratch", ignore_errors=True)
