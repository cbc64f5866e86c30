"""Commands of Slurm with given answers, on PATH: for what asks them, where no Slurm is."""

import os
import shlex
from pathlib import Path

import pytest


class SlurmCommands:
    """A folder of commands, first on PATH. Each call is noted."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder / "commands"
        self._folder.mkdir()
        self._noted = folder / "calls"
        monkeypatch.setenv("PATH", str(self._folder), prepend=os.pathsep)

    def answer(self, name: str, text: str = "", fails: str = "") -> None:
        """Let a command print a text; or fail, with a text on its standard error."""
        does = f"printf %s {shlex.quote(fails)} >&2; exit 1" if fails else f"printf %s {shlex.quote(text)}"
        self.do(name, does)

    def do(self, name: str, code: str) -> None:
        """Let a command run lines of shell."""
        file = self._folder / name
        file.write_text(f'#!/bin/sh\necho "{name} $*" >> {shlex.quote(str(self._noted))}\n{code}\n')
        file.chmod(0o755)

    def calls(self, *names: str) -> list[str]:
        """Return the calls so far of these commands."""
        noted = self._noted.read_text().splitlines() if self._noted.exists() else []
        return [call for call in noted if call.partition(" ")[0] in names]
