"""Real FIRE rows, and small files of other makers' forms, in a folder beside the checkout: they are no part of it."""

import os
from pathlib import Path

import pytest

SHARED = Path(__file__).parents[3] / "shared"
FOLDER = SHARED / "data" / "fire-demo"
FORMS = SHARED / "examples" / "forms"


def real_rows(name: str) -> Path:
    """Return a file of real FIRE rows. Without it the test is skipped; under CI it fails."""
    return _there(FOLDER / name)


def example_of_a_form(name: str) -> Path:
    """Return a file, or folder, of rows in another maker's form. Without it the test is skipped; under CI it fails."""
    return _there(FORMS / name)


def _there(file: Path) -> Path:
    if not file.exists():
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(f"there is no {file}")
    return file
