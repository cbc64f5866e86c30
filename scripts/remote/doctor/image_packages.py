"""Compares the packages of an image with those of a lock file."""

import re
from pathlib import Path

from packaging.markers import Marker

from remote.findings import Finding

LOCKED = re.compile(r"^([A-Za-z0-9._-]+)(?:\[[^]]*\])?==([^ ;\\]+)\s*(?:;\s*([^\\]+))?", re.MULTILINE)


def locked_versions(lock: Path, python: str) -> dict[str, str]:
    """Return name and version of every package in a lock file, for a version of Python ("3.12.1")."""
    environment = {"python_full_version": python, "python_version": ".".join(python.split(".")[:2])}
    return {
        _canonical(name): version
        for name, version, marker in LOCKED.findall(lock.read_text())
        if not marker or Marker(marker.strip()).evaluate(environment)
    }


def check_image(image: str, python: str, packages: dict[str, str | None], lock: Path) -> Finding:
    """Check the packages of an image against a lock file. packages: versions by name, as its pod reported them."""
    present = {_canonical(name): version for name, version in packages.items()}
    locked = locked_versions(lock, python)
    wrong = [
        f"{name} {present.get(name, 'missing')} instead of {version}"
        for name, version in locked.items()
        if present.get(name) != version
    ]
    what = f"image {lock.stem}"
    if wrong:
        few = ", ".join(wrong[:3]) + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else "")
        step = f"rebuild the image (docker build --target {lock.stem}) with a new tag, and set it in the overlay"
        return Finding(what, "fail", f"{image} was built from another envs/{lock.name}: {few}", step)
    return Finding(what, "ok", f"{image}: its {len(locked)} packages match envs/{lock.name}")


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
