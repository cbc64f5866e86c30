"""Writes the commit of a wheel, for provenance, at its build: hatchling calls it (pyproject.toml)."""

import subprocess
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NAME = "built_from.txt"
"""In an sdist at the top; in the package beside the Snakefile (`vlmflow.merging.proof.git_commit` reads it)."""


class BuiltFrom(BuildHookInterface):
    """Adds the file to an sdist and to a wheel, also to one that is built from an sdist."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write it. An editable installation reads its commit from the clone."""
        if version == "editable":
            return
        root = Path(self.root)
        if not (file := root / NAME).is_file():
            call = ["git", "-C", str(root), "describe", "--always", "--dirty=+changes", "--abbrev=40", "--exclude=*"]
            file = Path(self.directory) / NAME
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(subprocess.run(call, capture_output=True, text=True, check=True).stdout)
        build_data["force_include"][str(file)] = NAME if self.target_name == "sdist" else f"vlmflow/workflow/{NAME}"
