"""What the check needs of a machine's own Python, and what is missing."""

import importlib.metadata
import re
import tomllib
from pathlib import Path

from gpu.pack import LEFT_OUT, OF_THE_MACHINE

PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


def what_is_missing() -> list[str]:
    """Return a line for each package of the project that is missing, or has another version than the locked one.

    What the machine brings itself, such as torch, may have any version.
    """
    groups = tomllib.loads(PROJECT.read_text())["dependency-groups"]
    lines = []
    for requirement in (entry for group in ("data", "train") for entry in groups[group] if isinstance(entry, str)):
        name, version = re.split(r"[\[=>]", requirement)[0], requirement.partition("==")[2]
        if name in LEFT_OUT:
            continue
        try:
            installed = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            lines.append(f"{name} is missing")
        else:
            if version and installed != version and name not in OF_THE_MACHINE:
                lines.append(f"{name} is {installed}, {version} is needed")
    if lines:
        lines.append("`make gpu-check PYTHON=.venv/bin/python` has all of it, once `make demo` has made .venv")
        lines.append("for a machine without network, `make gpu-pack` on another one makes an archive of it")
    return lines
