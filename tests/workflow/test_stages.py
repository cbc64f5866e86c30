"""A stage has one name everywhere, and its outputs are in every list of targets."""

import re
from pathlib import Path
from typing import Any

import pytest
from snakemake.io import strip_wildcard_constraints

from rules import read_rules
from vlmflow.config.model import TARGETS
from vlmflow.harness.plan import LOOKING, TRAINING
from vlmflow.remote.job import DECIDED_BY
from workflow_runs import ROOT


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Every rule of the workflow except `all`, as Snakemake reads them, with those that join parts."""
    return read_rules(tmp_path_factory.mktemp("empty"), cluster={"pods_per_stage": 2})


def folders(rules: list[Any]) -> set[str]:
    """Return the top-level folders of all outputs."""
    written = [str(file) for rule in rules for file in (*rule.output, *rule.log, rule.benchmark)]
    return {name.partition("/")[0] for name in written}


def test_rule_script_log_and_benchmark_have_one_name(rules: list[Any]) -> None:
    for rule in rules:
        assert Path(rule.script).stem == rule.name
        log, benchmark = (strip_wildcard_constraints(str(file)) for file in (rule.log[0], rule.benchmark))
        assert re.fullmatch(rf"logs/{rule.name}/[^/]+\.log", log), rule.name
        assert benchmark == f"benchmarks/{rule.name}/{Path(log).stem}.tsv"


def test_every_rule_file_is_read_and_holds_the_rule_of_its_name(rules: list[Any]) -> None:
    files = {file.stem: file.read_text() for file in (ROOT / "rules").glob("*.smk")}
    assert files.keys() <= {rule.name for rule in rules}
    for name, text in files.items():
        first, *others = re.findall(r"^ *(?:use )?rule (?:\w+ as )?(\w+)(?::| with:)$", text, re.MULTILINE)
        assert first == name
        assert all(other.startswith("join_") for other in others), name


def test_rules_that_code_and_pages_name_exist(rules: list[Any]) -> None:
    """Those in checks before a run, in the doctor's advice, and in the commands of messages and pages."""
    named = {*TRAINING, *LOOKING, *DECIDED_BY}
    for file in [*ROOT.glob("scripts/**/*.py"), *ROOT.glob("docs/*.md"), *ROOT.glob("*.md"), ROOT / "Makefile"]:
        named |= set(re.findall(r"--(?:forcerun|set-resources|allowed-rules) ([a-z]\w+)", file.read_text()))
    assert {"resolve_images", "fit_rows"} < named
    assert named <= {rule.name for rule in rules}


def test_output_folders_are_refused_as_user_folders(rules: list[Any]) -> None:
    assert folders(rules) == set(TARGETS)


def test_git_ignores_whatever_rules_write(rules: list[Any]) -> None:
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert [name for name in folders(rules) if f"/{name}/" not in ignored] == []


def test_the_outputs_page_names_every_rule_with_its_targets(rules: list[Any]) -> None:
    page = (ROOT / "docs" / "outputs.md").read_text()
    rows = page[page.index("| target | made by | guarantee |") :].partition("\n\n")[0].splitlines()[2:]
    contract = [row.split("|")[1:3] for row in rows]
    for rule in rules:
        if rule.name.startswith("join_"):
            made = " ".join(by for _, by in contract)
            assert f"`{rule.name}`" in made
            continue
        targets = " ".join(target for target, by in contract if f"`{rule.name}`" in by or by.strip() == "the same")
        for folder in folders([rule]) - {"logs", "benchmarks"}:
            assert f"`{folder}/" in targets, f"docs/outputs.md does not say what {rule.name} makes in {folder}/"
