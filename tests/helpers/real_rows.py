"""Real FIRE rows, in a folder beside the checkout: they are no part of it."""

import os
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "shared" / "data" / "fire-demo"


def real_rows(name: str) -> Path:
    """Return a file of real FIRE rows. Without it the test is skipped; under CI it fails."""
    if not (file := FOLDER / name).is_file():
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(f"there is no {file}")
    return file
