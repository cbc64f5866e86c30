"""Variables of make are data: neither a shell nor make itself runs what a person, or a script, writes into them."""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from workflow_runs import ROOT

MAKEFILE = (ROOT / "Makefile").read_text()

HOSTILE = """x"$(touch ran)"'`touch ran`' $$(touch ran) `touch ran`; touch ran & $(shell touch ran) * """
OPEN = "x'\"`touch ran` $(touch ran)\n$(shell touch ran)"
"""Quotes that are not closed, and a second line."""

STUB = '#!/bin/sh\nprintf \'%s\\0\' "$@" >> "$RECORD"\n'
"""A program that records the words that it gets."""

FUNCTIONS = {"error", "foreach", "eval", "value", "call", "if", "filter", "wildcard"}
NAMES = set(re.findall(r"\$[({](\w+)", re.sub(r"\$\$[({]\w+", "", MAKEFILE))) - FUNCTIONS - {"1", "name"}
"""All variables that the Makefile reads as make's."""

SWITCHES = {"ADAPTER", "PUBLIC", "YES"}
"""Those of them that a person gives: compared with 1 by make, and no text of a recipe."""

GIVEN = re.search(r"GIVEN := ((?:.|\\\n)*?[^\\])\n", MAKEFILE)[1].replace("\\\n", "").split()  # type: ignore[index]
TARGETS = [name for names in re.findall(r"(?m)^\.PHONY: (.*)", MAKEFILE) for name in names.split()]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a folder with the Makefile, in which every environment is installed and every program is a stub."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copytree(ROOT / "envs", tmp_path / "envs")
    for name in (
        "notebooks",
        "scripts/vlmflow/tools",
        "scripts/vlmflow/demo",
        "runs/demo/sample",
        "runs/demo/tiny-model",
        "home",
    ):
        (tmp_path / name).mkdir(parents=True)
    for name in ("scripts/vlmflow/tools/make_sample.py", "scripts/vlmflow/tools/make_tiny_model.py"):
        (tmp_path / name).touch()
    for file in tmp_path.rglob("*"):
        os.utime(file, (1, 1))
    for folder in (".venv", ".venv-track", ".venv-search"):
        (tmp_path / folder / "bin").mkdir(parents=True)
    for name in ("python", "snakemake", "uv", "jupyter", "ruff", "snakefmt", "mypy"):
        (tmp_path / ".venv" / "bin" / name).write_text(STUB)
        (tmp_path / ".venv" / "bin" / name).chmod(0o755)
    for stamp in (*(f".venv/{name}.stamp" for name in ("data", "train", "dev", "jupyter")), ".venv-track/whole.stamp"):
        (tmp_path / stamp).touch()
    (tmp_path / ".venv-search/whole.stamp").touch()
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
    assert set(GIVEN) & NAMES == SWITCHES
    assert NAMES - fixed == SWITCHES


@pytest.mark.parametrize("name", sorted(SWITCHES))
@pytest.mark.parametrize("value", ["yes", "0", HOSTILE, OPEN])
def test_a_switch_is_1_or_left_out(checkout: Path, name: str, value: str) -> None:
    """Or else a person believes that something is public, or private, and it is not."""
    call = ["make", "--no-print-directory", "publish", f"{name}={value}"]
    done = subprocess.run(call, cwd=checkout, capture_output=True, text=True, check=False)
    assert done.returncode
    assert f"{name} is 1, or is left out" in done.stderr
    assert not [*checkout.rglob("ran*")]


@pytest.mark.parametrize("how", ["command line", "environment"])
def test_no_text_is_run(checkout: Path, how: str) -> None:
    names = {*GIVEN, *(NAMES if how == "command line" else ()), "SHELL", ".SHELLFLAGS"} - SWITCHES
    words = words_of(checkout, {name: f"{name} {HOSTILE}" for name in names}, how)
    text = {name: f"{name} {HOSTILE}" for name in GIVEN}
    for whole in (
        *(text[name] for name in ("RUN", "FIRE", "STEP", "NAMESPACE", "FROM", "TO")),
        *(f"--{name.lower()}={text[name]}" for name in ("PORT", "PICTURE", "ASK", "FEEDBACK")),
        f"data/{text['DATASET']}/stats.json",
        f"merged/{text['RUN']}",
        f"{text['FROM']}/{text['TARGET']}",
    ):
        assert whole in words
    for name in ("ARGS", "CONFIG", "NAMES", "TARGET"):
        at = words.index(name)
        assert words[at + 1] == "x$(touch ran)`touch ran`", "quotes make one word, as in a shell"
        assert words[at + 2 : at + 5] == ["$$(touch", "ran)", "`touch"]
    assert (f"--gpus={text['GPUS']}" in words) is (how == "command line")


@pytest.mark.parametrize("how", ["command line", "environment"])
def test_open_quotes_end_the_command(checkout: Path, how: str) -> None:
    words = words_of(checkout, dict.fromkeys(set(GIVEN) - SWITCHES, OPEN), how)
    assert f"merged/{OPEN}" in words
    assert "vlmflow.tools.check_config" not in words
    assert "vlmflow.tools.index_page" not in words


def test_what_a_person_writes_reaches_the_programs(checkout: Path) -> None:
    plain = words_of(checkout, {}, "environment")
    assert not [word for word in plain if word.startswith(("--port", "--gpus", "--picture"))]
    assert "merged/qwen3vl-fire" in plain
    given = {"RUN": "mine", "ARGS": "--directory 'my folder' --what base", "ADAPTER": "1", "CONFIG": "a.yaml b.yaml"}
    words = words_of(checkout, given, "command line")
    at = words.index("vlmflow.tools.serve")
    assert words[at : at + 9] == [
        *("vlmflow.tools.serve", "--run", "mine", "--what", "adapter"),
        *("--directory", "my folder", "--what", "base"),
    ]
    assert "vlmflow.tools.check_config a.yaml b.yaml" in " ".join(words)
    at = words.index("vlmflow.remote.cluster.controller")
    assert "merged/mine" in words


def test_every_program_with_a_configuration_gets_the_files(checkout: Path) -> None:
    """No command names them in another way; what reads only what a run recorded has none."""
    given = {"CONFIG": "a.yaml 'my run.yaml'", "ARGS": "--directory x", "STEP": "1"}
    said = " ".join(words_of(checkout, given, "command line"))
    takes = {
        file.stem for file in (ROOT / "scripts" / "vlmflow" / "tools").glob("*.py") if ".configfile" in file.read_text()
    }
    assert {"board", "try_run", "track_run"} < takes
    files = "--configfile a.yaml my run.yaml --directory x"
    for name in takes:
        assert files in said[said.index(f"vlmflow.tools.{name} ") :][:120], name
    for end in ("reports/estimate-qwen3vl-fire.html", "merged/qwen3vl-fire"):
        assert f"{files} -- {end}" in said
    assert said.count(files) == len(takes) + len(["run", "estimate", "refresh-pictures", "doctor", "cluster-run"])


def test_the_files_are_read_before_snakemake_starts(checkout: Path) -> None:
    """It reads --configfile before the Snakefile, and names neither file nor line of a fault."""
    python = checkout / ".venv" / "bin" / "python"
    python.write_text(f"{STUB}exit 1\n")
    for target in ("run", "estimate", "refresh-pictures", "cluster-run"):
        record = checkout / "record"
        record.write_text("")
        words = ["make", "--no-print-directory", target, "CONFIG=a.yaml b.yaml"]
        done = subprocess.run(words, cwd=checkout, env=os.environ | {"RECORD": str(record)}, check=False)
        assert done.returncode
        assert record.read_text().split("\0") == [
            "-m",
            "vlmflow.tools.check_config",
            "--only-yaml",
            "a.yaml",
            "b.yaml",
            "",
        ]


def test_files_that_are_named_in_two_ways_are_refused(checkout: Path) -> None:
    """Snakemake would take those of ARGS alone."""
    words = ["make", "clean-runs", "CONFIG=a.yaml", "ARGS=--directory x --configfile b.yaml"]
    done = subprocess.run(words, cwd=checkout, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "CONFIG and --configfile in ARGS: name all files by CONFIG" in done.stderr


def test_a_run_without_a_configuration_is_refused(checkout: Path) -> None:
    done = subprocess.run(["make", "run", "CONFIG="], cwd=checkout, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "say which: make run CONFIG=my-run.yaml" in done.stderr
