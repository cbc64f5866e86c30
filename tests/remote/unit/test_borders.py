"""What runs elsewhere stands apart: who imports it, what it imports, and that a local call loads none of it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from small_workflow import make_rows
from vlmflow.harness.read_code import read_code
from workflow_runs import ROOT

SCRIPTS = ROOT / "scripts"
REMOTE = SCRIPTS / "vlmflow" / "remote"
LIBRARY = REMOTE / "library.py"
LIBRARY_NAMES = ("vlmflow.core.", "vlmflow.config.", "vlmflow.CHECKOUT", "vlmflow.PACKAGE", "vlmflow.SCRIPTS")

DOORS = {"vlmflow/command.py", "vlmflow/harness/start.py", "vlmflow/tools/status.py"}
"""The only files outside that name one of its modules."""

CLIENTS = re.compile(r"(vlmflow\.remote|kubernetes|boto3|s3transfer|botocore\.(client|session))(\.|$)")
"""Of S3's client only the classes of its exceptions may be there, which take a hundredth of a second."""

LOADED = re.compile(r"^import '([\w.]+)' # ", re.MULTILINE)


def ours(file: Path) -> set[str]:
    """Return what a file imports of the project, and the modules of it that it names by a text."""
    module = read_code(file.read_bytes())
    uses = [use.lstrip("!'") for statement in module.statements for use in statement.uses]
    return {name for name in [*module.loads, *uses] if name.startswith("vlmflow.")}


def test_all_that_it_uses_of_the_project_comes_through_one_module() -> None:
    """Then the package can leave vlmflow: another module of this name is all that it takes."""
    taken = set()
    for file in REMOTE.rglob("*.py"):
        names = ours(file)
        outside = {name for name in names if not f"{name}.".startswith("vlmflow.remote.")}
        if file == LIBRARY:
            assert {name for name in outside if not name.startswith(LIBRARY_NAMES)} == set()
            given = {name.rpartition(".")[2] for name in outside}
        else:
            assert outside == set(), file
            taken |= {name.split(".")[3] for name in names if name.startswith("vlmflow.remote.library.")}
    assert given == taken, "it names what another module of the package uses, and nothing else"


@pytest.mark.parametrize("name", ["folder_trials.py", "cluster/file_stream.py", "kubernetes/ddp_trial.py"])
def test_a_program_that_a_pod_gets_as_text_imports_nothing_of_the_project(name: str) -> None:
    assert ours(REMOTE / name) == set()


def test_three_files_outside_know_it_and_none_of_the_library() -> None:
    files = [file for file in SCRIPTS.rglob("*.py") if not file.is_relative_to(REMOTE)]
    knowing = {file for file in files if any(name.startswith("vlmflow.remote.") for name in ours(file))}
    assert {file.relative_to(SCRIPTS).as_posix() for file in knowing} == DOORS
    for rule in (ROOT / "rules").glob("*.smk"):
        assert "remote" not in rule.read_text(), rule


def loaded(folder: Path, *words: str) -> list[str]:
    """Call Snakemake for a data set in `folder`; return the modules that it and its jobs' processes imported."""
    call = [sys.executable, "-m", "snakemake", "--snakefile", ROOT / "Snakefile", "--directory", folder, "--cores", "1"]
    done = subprocess.run(
        [*call, "--configfile", folder / "mine.yaml", *words],
        env=os.environ | {"PYTHONVERBOSE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, "\n".join(re.findall("^(?!import |#|cleanup).+$", done.stderr, re.MULTILINE))[-4000:]
    return LOADED.findall(done.stderr)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    block = {"kind": "prompt_completion", "modality": "text", "train": str(tmp_path / "rows.jsonl")}
    (make_rows(tmp_path) / "mine.yaml").write_text(yaml.safe_dump({"datasets": {"x": block}}))
    return tmp_path


def test_a_dry_run_and_a_job_on_this_machine_load_nothing_of_it(folder: Path) -> None:
    target = "raw/x/rows.jsonl"
    for words, processes in ((["-n", "--", target], 1), (["--", target], 2)):
        names = loaded(folder, *words)
        assert names.count("vlmflow.harness.stage") == processes, "the stage was looked at, too"
        assert {"snakemake_executor_plugin_kubernetes", "snakemake_storage_plugin_s3", "vlmflow.harness.start"} <= set(
            names
        )
        assert list(filter(CLIENTS.match, names)) == []
    assert (folder / target).exists()


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--default-storage-provider", "fs", "--default-storage-prefix", "targets"], "vlmflow.remote.storage.plugins"),
        (
            ["--executor", "kubernetes", "--kubernetes-namespace", "none", "--jobs", "1"],
            "vlmflow.remote.kubernetes.executor",
        ),
    ],
)
def test_a_call_that_asks_for_it_gets_it(folder: Path, words: list[str], part: str) -> None:
    """Of the executor the templates are checked, before a cluster is asked for."""
    prefix = ["--default-storage-provider", "fs", "--default-storage-prefix", str(folder), "--shared-fs-usage", "none"]
    assert part in loaded(folder, "-n", *prefix, *words, "--", "raw/x/rows.jsonl")
