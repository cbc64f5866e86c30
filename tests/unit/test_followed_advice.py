"""For each kind of advice one test does what the message says, and is done: those are here that need no training."""

import ast
import fcntl
import re
from pathlib import Path

import pytest

from hub_server import TOKEN, served_hub
from texts_of_code import next_steps
from vlmflow.config.source import HubSource
from vlmflow.config.yaml_file import read_yaml
from vlmflow.core import files
from vlmflow.core.errors import PassingError, VlmflowError
from vlmflow.core.files import whole_file
from vlmflow.fetch import hub
from vlmflow.pictures.roots import PictureRoots
from workflow_runs import ROOT

pytestmark = pytest.mark.lengthy

HERE = "tests/unit/test_followed_advice.py::"

KINDS: dict[str, tuple[str, str]] = {
    "make it again": (
        r"snakemake (?:…|--forcerun)|make refresh-pictures|(?:made|make|fit|tell|ask|evaluate|train)\b.* again",
        "tests/workflow/test_swapped_files.py::test_the_command_in_a_refusal_checks_the_picture_again",
    ),
    "remove what is damaged": (
        r"\b(?:remove|delete|rename|move|unset|restore|put it back|leave \w+ out|empty)\b",
        "tests/unit/in_trainer/test_events.py::test_a_damaged_line_is_named_and_costs_no_training",
    ),
    "set a key": (
        r"\b(?:runs|datasets|models|search|stores|cluster)\.|\b(?:train|smoke|verify)\.\w|config: |objective:|"
        r"nodes: |picture_sources|swift_args|pins\.yaml|VALUE: true",
        "tests/unit/lengths/test_over_long.py::test_rows_that_are_left_out_are_counted_and_named",
    ),
    "give a command's variable": (
        r"\b[A-Z]+=|\bTMPDIR\b|KUBECONFIG|\bmake \w+",
        "tests/workflow/test_swapped_files.py::test_the_command_in_a_refusal_checks_the_picture_again",
    ),
    "name another file, folder or name": (
        r"\b(?:name|give|put|use|choose|take|say|write|ask|work)\b",
        HERE + "test_a_folder_that_is_named_as_advised_is_taken",
    ),
    "fix a file": (
        r"\badd keys|\b(?:fix|save|fetch|correct|close|copy|convert|change|merge it)\b|must hold|must be JSON",
        HERE + "test_a_file_that_is_saved_as_advised_is_read",
    ),
    "wait": (r"\bwait\b|later\b|after that time", HERE + "test_who_waits_as_advised_writes"),
    "run the same command again": (
        r"same command|run again|run it again|resumes",
        "tests/stages/test_trainer.py::test_an_interrupted_training_saves_and_resumes",
    ),
    "make room": (
        r"\bfree\b|\bdisk\b|\bmemory\b|\bhours\b|\bGPUs\b",
        "tests/stages/test_trainer.py::test_a_full_disk_stops_the_training_which_resumes_when_there_is_room",
    ),
    "train in another way": (
        r"learning rate|\btrain (?:without|the|otherwise|again)|\btraining\b|start trainers",
        "tests/stages/test_training_faults.py::test_a_step_without_a_finite_number_ends_the_training_before_it_is_saved",
    ),
    "look": (
        r"\b(?:see|look|read|check|find out|says? why)\b|the stacks are",
        "tests/unit/serving/test_running.py::test_a_server_that_ends_is_explained_by_its_output",
    ),
    "install": (
        r"\binstall|\bupdate\b|make env-|same version",
        "tests/workflow/test_search_plan.py::test_a_missing_environment_is_said_by_a_dry_run",
    ),
    "set a token": (r"token|\bkey\b|\bset it\b", HERE + "test_a_token_that_is_set_as_advised_opens_the_repository"),
    "apply to the cluster": (r"kubectl|administrator|overlay", "tests/remote/cluster/test_doctor.py"),
    "report": (r"\breport (?:it|this)\b", ""),
    "do not use it": (r"do not (?:use|trust|publish)|publish its", ""),
}
"""Kinds of next steps: how they are recognised, and the test that follows one to its end. The last two leave nothing to
do here."""


def test_every_next_step_is_of_a_kind_that_a_test_follows() -> None:
    found = {
        place: [kind for kind, (words, _) in KINDS.items() if re.search(words, text)] for place, text in next_steps()
    }
    assert len(found) > 250
    assert [place for place, kinds in found.items() if not kinds] == []
    for kind, (_, followed) in KINDS.items():
        assert any(kind in kinds for kinds in found.values()), kind
        file, _, name = followed.partition("::")
        if followed:
            names = {
                node.name
                for node in ast.walk(ast.parse((ROOT / file).read_text()))
                if isinstance(node, ast.FunctionDef)
            }
            assert not name or name in names, followed


def said_by(error: pytest.ExceptionInfo[VlmflowError], words: str) -> None:
    assert words in error.value.next_step


def test_a_folder_that_is_named_as_advised_is_taken(tmp_path: Path) -> None:
    with pytest.raises(VlmflowError) as error:
        PictureRoots([str(tmp_path / "pictures")], "datasets.x.image_roots")
    said_by(error, "name a folder that can be read: datasets.x.image_roots")
    (tmp_path / "pictures").mkdir()
    PictureRoots([str(tmp_path / "pictures")], "datasets.x.image_roots")


def test_a_file_that_is_saved_as_advised_is_read(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("a: ä", encoding="latin-1")
    with pytest.raises(VlmflowError) as error:
        read_yaml(file)
    said_by(error, "save the file as UTF-8")
    file.write_text(file.read_text(encoding="latin-1"), encoding="utf-8")
    assert read_yaml(file) == {"a": "ä"}


def test_who_waits_as_advised_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PATIENCE", 0.2)
    file = tmp_path / "rows.jsonl"
    with files.unfinished(file).open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(PassingError) as error, whole_file(file):
            pass
    said_by(error, "wait for it to end, or stop it; then run the same command again")
    with whole_file(file) as written:
        written.write(b"{}")
    assert file.read_bytes() == b"{}"


def test_a_token_that_is_set_as_advised_opens_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    with served_hub(monkeypatch) as server:
        server.add("o/m", {"config.json": b"{}"}, plain=("config.json",))
        monkeypatch.setenv("HF_TOKEN", "hf_old")
        with pytest.raises(VlmflowError) as error:
            hub.describe(HubSource("model", "o/m", None))
        said_by(error, "set a token for it: HF_TOKEN")
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        assert hub.describe(HubSource("model", "o/m", None))
