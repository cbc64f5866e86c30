"""How many files an addition touches: real additions, as patches, that the project itself does not contain.

Each patch is applied to a clone of the working tree; there `make docs` runs, and the patch's own tests.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from workflow_runs import checkout

PATCHES = Path(__file__).parents[1] / "exercises"

FILES = {"new-executor": 5, "new-family": 3, "new-form": 5, "new-stage": 9, "new-strategy": 4}
"""By patch, how many files it may touch; the files of `make docs` count as one."""

FORGOTTEN = {
    "new-executor": [
        "tests/remote/unit/test_borders.py::test_all_that_it_uses_of_the_project_comes_through_one_module",
        "tests/remote/unit/test_borders.py::test_three_files_outside_know_it_and_none_of_the_library",
    ],
    "new-family": [
        "tests/stages/test_families.py",
        "tests/stages/test_families.py::test_text_models_become_proven_weights[gemma]",
    ],
    "new-form": ["tests/workflow/test_stages.py"],
    "new-stage": ["tests/workflow/test_stages.py"],
    "new-strategy": ["tests/unit/supervisor/test_arguments.py", "tests/unit/config/test_config.py"],
}
"""By patch, the tests that report what was forgotten, besides its own."""


def git(root: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"git {' '.join(words)}: {done.stderr}"
    return done.stdout


def test_every_exercise_is_done() -> None:
    assert sorted(FILES) == sorted(patch.stem for patch in PATCHES.glob("*.patch"))


def with_addition(root: Path, exercise: str) -> list[str]:
    """Make a clone with an addition; return the files that its patch touches."""
    checkout(root)
    git(root, "apply", "--index", str(PATCHES / f"{exercise}.patch"))
    touched = git(root, "diff", "--cached", "--name-only").split()
    made = _plain() | {"PYTHONPATH": "scripts"}
    subprocess.run(
        [sys.executable, "-m", "vlmflow.tools.make_docs"], cwd=root, env=made, check=True, capture_output=True
    )
    generated = git(root, "diff", "--name-only").split()
    assert len(touched) + bool(generated) <= FILES[exercise], touched
    return touched


@pytest.mark.parametrize("exercise", FILES)
def test_an_addition_touches_few_files(tmp_path: Path, exercise: str) -> None:
    with_addition(tmp_path / "clone", exercise)


@pytest.mark.slow
@pytest.mark.parametrize("exercise", FILES)
def test_an_addition_works(tmp_path: Path, exercise: str) -> None:
    root = tmp_path / "clone"
    tests = [name for name in with_addition(root, exercise) if Path(name).name.startswith("test_")]
    assert tests or exercise == "new-family"
    call = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, *FORGOTTEN[exercise]]
    done = subprocess.run(call, cwd=root, env=_plain(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def _plain() -> dict[str, str]:
    """Return the environment without the variables of this pytest and of its conftest.py, and without their modules."""
    return {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST", "PYTHONPATH", "VLMFLOW_"))}
