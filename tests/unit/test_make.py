"""Variables of make are data: neither a shell nor make itself runs what a person, or a script, writes into them."""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from workflow_runs import ROOT, refusal

MAKEFILE = (ROOT / "Makefile").read_text()

HOSTILE = """x"$(touch ran)"'`touch ran`' $$(touch ran) `touch ran`; touch ran & $(shell touch ran) * """
OPEN = "x'\"`touch ran` $(touch ran)\n$(shell touch ran)"
"""Quotes that are not closed, and a second line."""

STUB = '#!/bin/sh\nprintf \'%s\\0\' "$@" >> "$RECORD"\n'
"""A program that records the words that it gets."""

FUNCTIONS = {"call", "eval", "filter", "firstword", "foreach", "if", "patsubst", "subst", "value", "word"}
NAMES = set(re.findall(r"\$[({](\w+)", re.sub(r"\$\$[({]\w+", "", MAKEFILE))) - FUNCTIONS - {"1", "name", "pair"}
"""All variables that the Makefile reads as make's."""

FORMER = (
    *("run", "check-config", "estimate", "refresh-pictures", "clean-runs", "board", "index", "notebook", "rows", "try"),
    *("serve", "verify", "track", "publish", "pins", "doctor", "status", "cluster-token", "cluster-push"),
    *("cluster-run", "cluster-get", "cluster-put", "cluster-log", "cluster-stop"),
)
"""Targets that were here before `vlmflow`."""

GIVEN = re.search(r"GIVEN := ((?:.|\\\n)*?[^\\])\n", MAKEFILE)[1].replace("\\\n", "").split()  # type: ignore[index]
TARGETS = [name for names in re.findall(r"(?m)^\.PHONY: (\w.*)", MAKEFILE) for name in names.split()]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a folder with the Makefile, in which every environment is installed and every program is a stub."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(ROOT / "envs", tmp_path / "envs")
    (tmp_path / "home").mkdir()
    for file in tmp_path.rglob("*"):
        os.utime(file, (1, 1))
    for folder in (".venv", ".venv-track", ".venv-search"):
        (tmp_path / folder / "bin").mkdir(parents=True)
    for name in ("python", "vlmflow", "snakemake", "uv", "ruff", "snakefmt", "mypy"):
        (tmp_path / ".venv" / "bin" / name).write_text(STUB)
        (tmp_path / ".venv" / "bin" / name).chmod(0o755)
    for stamp in (
        *(f".venv/{name}" for name in ("data", "train", "dev", "command")),
        ".venv-track/whole",
        ".venv-search/whole",
    ):
        (tmp_path / f"{stamp}.stamp").touch()
    return tmp_path


def words_of(checkout: Path, given: Mapping[str, str], how: str) -> list[str]:
    """Make all targets with some variables, from the command line or the environment; return the programs' words."""
    record = checkout / "record"
    record.write_text("")
    env = {"PATH": os.environ["PATH"], "HOME": str(checkout / "home"), "RECORD": str(record)}
    line = [f"{name}={text}" for name, text in given.items()] if how == "command line" else []
    call = ["make", "--no-print-directory", "--keep-going", *TARGETS, *line]
    env |= {} if line else given
    done = subprocess.run(call, cwd=checkout, env=env, capture_output=True, text=True, check=False)
    assert not [*checkout.rglob("ran*")], done.stdout + done.stderr
    return record.read_text().split("\0")


def test_every_variable_of_the_makefile_is_given_or_fixed() -> None:
    fixed = set(re.findall(r"(?m)^override (\w+) :?=", MAKEFILE))
    assert set(GIVEN) <= set(re.findall(r"(?m)^(\w+) [?:]=", MAKEFILE))
    assert set(GIVEN) & NAMES == set()
    assert fixed >= NAMES


@pytest.mark.parametrize("how", ["command line", "environment"])
def test_no_text_is_run(checkout: Path, how: str) -> None:
    program = str(checkout / ".venv" / "bin" / "python")
    names = {*GIVEN, *(NAMES if how == "command line" else ()), "SHELL", ".SHELLFLAGS"}
    words = words_of(checkout, {name: f"{name} {HOSTILE}" for name in names} | {"PYTHON": program}, how)
    options = {f"--{name.lower()}={name} {HOSTILE}" for name in ("SHAPE", "MINUTES", "OUT", "CUDA")}
    assert {f"FIRE {HOSTILE}", *options} <= set(words)
    for name in ("ARGS", "NAMES"):
        at = words.index(name)
        assert words[at + 1] == "x$(touch ran)`touch ran`", "quotes make one word, as in a shell"
        assert words[at + 2 : at + 5] == ["$$(touch", "ran)", "`touch"]
    words_of(checkout, {"PYTHON": f"PYTHON {HOSTILE}"}, how)


@pytest.mark.parametrize("how", ["command line", "environment"])
def test_open_quotes_end_the_command(checkout: Path, how: str) -> None:
    program = str(checkout / ".venv" / "bin" / "python")
    words = words_of(checkout, dict.fromkeys(GIVEN, OPEN) | {"PYTHON": program}, how)
    assert OPEN in words, "FIRE is one text"
    assert "tests/gpu/pack.py" in words
    assert "tests/gpu/gpu_check.py" not in words, "ARGS are words"
    assert words.count("tests/mutations/run.py") == len(["test-slow"]), "NAMES are words"


def test_the_demo_is_that_of_the_command(checkout: Path) -> None:
    words = words_of(checkout, {}, "environment")
    assert words[words.index("demo") - 1 :][:2] == ["", "demo"] or words[0] == "demo"


def test_each_former_target_answers_with_the_line_to_type(tmp_path: Path) -> None:
    call = ["make", "--no-print-directory", "--keep-going", *FORMER, "CONFIG=my-run.yaml", "RUN=mine"]
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    said = dict(re.findall(r"(?m)^make (\S+) is now: vlmflow (.+) \(vlmflow --help\)$", done.stderr))
    assert set(said) == set(FORMER)
    for name, line in said.items():
        assert refusal(line.replace("step N", "step 1").split()) == "", f"make {name}: vlmflow {line}"
    assert said["cluster-put"].startswith("cluster put "), "the name alone does not say it"
