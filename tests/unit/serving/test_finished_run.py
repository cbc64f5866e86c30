"""What names a run: a word of a person, which becomes part of a path."""

import subprocess
import sys
from pathlib import Path

import pytest

from published_run import RUN, finished_run
from vlmflow.core.errors import VlmflowError
from vlmflow.serving.finished_run import published
from workflow_runs import program


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", "a.part"])
def test_what_is_no_name_is_no_run(tmp_path: Path, name: str) -> None:
    finished_run(tmp_path)
    with pytest.raises(VlmflowError, match=r"no name of a run|no run is named"):
        published(tmp_path, name)
    assert published(tmp_path, RUN).is_dir()


@pytest.mark.parametrize(
    ("script", "more"),
    [("track_run", []), ("publish_run", ["--to", "ann/it"]), ("check_provenance", []), ("try_run", []), ("serve", [])],
)
def test_a_command_without_a_run_says_how_to_name_one(tmp_path: Path, script: str, more: list[str]) -> None:
    (tmp_path / "merged").mkdir()
    words = [sys.executable, program(script), "--run", "", "--directory", tmp_path, *more]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("no run is named\n")
    assert "say which run: RUN=" in done.stderr
