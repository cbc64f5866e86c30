"""What a stage executes of the project's code is in the digest of its code: demo, Volcano, evaluation, search."""

import ast
import json
import os
import subprocess
import sys
import sysconfig
from bisect import bisect
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from bulk_rows import write_volcano_rows
from rules import read_rules
from vlmflow.config.raw_forms import modules_of
from vlmflow.harness.read_code import _bound, _parts
from vlmflow.harness.staleness import LEFT_OUT, Code
from workflow_runs import ROOT, RUN, clone, make_demo_folder

TRACED = ROOT / "tests" / "helpers" / "traced" / "traced_code.py"

SEARCH = {
    "rates": {"run": RUN, "space": {"learning_rate": [0.008, 0.01]}, "rounds": 1, "together": 1, "limits": {"hours": 1}}
}
EVALUATED = {
    RUN: {
        "evaluate": {"splits": ["val", "test"], "answers": True, "rows": 20},
        "answer": {"rows": 2, "rounds": 1, "max_tokens": 8},
    }
}
TARGETS = (
    f"merged/{RUN}",
    *(f"reports/{page}-{RUN}.html" for page in ("lengths", "run", "estimate", "eval")),
    "reports/data-fire.html",
    "search/rates/best.yaml",
    "reports/search-rates.html",
)

FROM_PARAMS = {("vlmflow.config.settings", "PartOf"), ("vlmflow.config.settings", "part_of")}
"""What makes a stage's settings of its rule's params, which are recorded (`staleness`)."""


def traced_environment(folder: Path, name: str, into: Path) -> None:
    """Make an environment with the packages of one of the project's, whose programs are traced."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    theirs = sysconfig.get_path("purelib", vars={"base": str(ROOT / name), "platbase": str(ROOT / name)})
    (packages / "packages.pth").write_text(f"import site; site.addsitedir({theirs!r})\n")
    (packages / "traced_code.py").write_text(TRACED.read_text())
    (packages / "traced.txt").write_text(f"{folder.parent}/scripts/\n{into}\n")
    (packages / "traced.pth").write_text("import traced_code\n")


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[tuple[str, int]]]:
    """Return the files and first lines of the functions that each stage called."""
    base = tmp_path_factory.mktemp("traced")
    root, into = clone(base / "clone"), base / "calls"
    into.mkdir()
    for name in (".venv", ".venv-search"):
        traced_environment(root / name, name, into)
    demo, volcano = make_demo_folder(base / "demo"), base / "volcano"
    (volcano / "rows").mkdir(parents=True)
    write_volcano_rows(volcano / "rows" / "rows.json", 240, seed=1)
    settings = yaml.safe_load((root / "profiles" / "demo" / "run.yaml").read_text())
    settings["models"]["tiny"]["source"] = str(demo / "tiny-model")
    data = {"kind": "volcano", "train": "rows/rows.json", "image_roots": ["rows/pictures"], "val_share": 0.1}
    quick = {"max_steps": 4, "checkpoint_steps": 2, "evaluation_steps": 2, "max_length": 640}
    run = settings["runs"][RUN] | {"dataset": "mine", "train": settings["runs"][RUN]["train"] | quick}
    (volcano / "run.yaml").write_text(yaml.safe_dump(settings | {"datasets": {"mine": data}, "runs": {RUN: run}}))
    (demo / "more.yaml").write_text(yaml.safe_dump({"runs": EVALUATED, "search": SEARCH}))
    configured = [root / "profiles" / "demo" / "run.yaml", demo / "quick.yaml", demo / "more.yaml"]
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VLMFLOW_WARM")}

    def make(folder: Path, files: list[Path], *targets: str) -> None:
        call = [root / ".venv" / "bin" / "python", "-m", "snakemake", "--directory", folder, "--cores", "2"]
        words = ["--workflow-profile", "none", "--configfile", *files, "--", *targets]
        done = subprocess.run([*call, *words], cwd=root, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]

    make(volcano, [volcano / "run.yaml"], f"merged/{RUN}", f"eval/{RUN}/val")
    make(demo, configured, f"chosen/{RUN}/val")
    choice = demo / "chosen" / RUN / "val" / "account.json"  # of a val too small to recommend a trial
    choice.write_text(json.dumps(json.loads(choice.read_text()) | {"all_groups": 100}))
    make(demo, configured, *TARGETS)
    calls = defaultdict(set)
    for file in into.iterdir():
        for line in file.read_text().splitlines():
            name, number = line.split("\t")
            calls[file.name.rpartition("-")[0]].add((name, int(number)))
    return dict(calls)


@cache
def names_at(name: str, line: int) -> frozenset[str]:
    """Return the names that a statement of a module binds: the one with this line."""
    body = ast.parse((ROOT / "scripts" / name).read_bytes()).body
    first = [min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", []))]) for node in body]
    node = body[bisect(first, line) - 1]
    return frozenset(_bound(_parts([node])))


def reached(code: Code, rule: Any) -> set[tuple[str, str]]:
    """Return the module and name of all that makes the jobs of a rule stale, and of what is on the list.

    On it are the layout of pages (LEFT_OUT), with what these reach, and the forms of rows that the runs do not have.
    """
    modules = rule.params.get("modules", [])
    if callable(modules):
        modules = [*modules_of("fire"), *modules_of("volcano")]
    found = code.reached(f"stages.{Path(rule.script).stem}", *modules, pages=rule.params.get("reads") is not None)
    found |= code.reached(*LEFT_OUT, *modules_of("auto"), pages=True)
    return {(one.module, name) for one in found for name in code.names(one)} | FROM_PARAMS


@pytest.mark.slow
def test_what_a_stage_executes_makes_it_stale(executed: dict[str, set[tuple[str, int]]], tmp_path: Path) -> None:
    code = Code(ROOT / "scripts")
    rules = {Path(rule.script).stem: rule for rule in read_rules(tmp_path, search=SEARCH) if rule.script}
    for stage, calls in executed.items():
        allowed = reached(code, rules[stage])
        called = {(file[:-3].replace("/", "."), name) for file, line in calls for name in names_at(file, line)}
        assert called - allowed == set(), stage
    never = {"fetch_images", "mix_rows", "track"}
    assert set(rules) - executed.keys() == never
    assert any("in_trainer/" in file for file, _ in executed["train_model"])  # trainers too
    assert any(file.endswith("search/study_program.py") for file, _ in executed["propose"])
