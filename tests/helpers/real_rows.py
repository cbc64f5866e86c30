"""Rows of others, in a folder beside the checkout: they are no part of it."""

import os
from pathlib import Path

import pytest

SHARED = Path(__file__).parents[3] / "shared"
FOLDER = SHARED / "data" / "fire-demo"


def real_rows(name: str) -> Path:
    """Return a file of real FIRE rows. Without it the test is skipped; under CI it fails."""
    return _beside(FOLDER / name)


def example_form(name: str) -> Path:
    """Return a small file of one maker's form, as this maker's writer wrote it. Without it the same happens."""
    return _beside(SHARED / "examples" / "forms" / name)


def _beside(file: Path) -> Path:
    if not file.is_file():
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(f"there is no {file}")
    return file
