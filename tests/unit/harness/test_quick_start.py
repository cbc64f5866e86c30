"""Expensive modules that a start does not load because it does not need them."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache

import pytest

from workflow_runs import ROOT

SCRIPTS = ROOT / "scripts"
STAGES = sorted(path.stem for path in (SCRIPTS / "stages").glob("*.py"))

TAKE_SECONDS = {"torch", "transformers", "swift", "peft"}
"""Packages whose import takes from one second to ten."""

ALSO_LOADED = {
    "accelerate": {"torch"},
    "peft": {"peft", "torch", "transformers"},
    "safetensors.torch": {"torch"},
    "swift": {"peft", "swift", "torch", "transformers"},
}
"""What packages import of them."""

LOADED_AT_START = {
    "judge_best": {"torch"},
    "merge_weights": {"torch"},
    "train_smoke": {"torch"},
    "trial": {"torch"},
    "verify_merged": {"peft", "swift", "torch", "transformers"},
    "verify_tensors": {"peft", "torch", "transformers"},
}
"""Which of them a stage loads at its start; the other stages load none, and import them later if they need them."""

MAIN_PROCESS = """
import subprocess, sys
from vlmflow.harness.patches import leave_out_what_nobody_uses
leave_out_what_nobody_uses()
from snakemake import iocontainers as io
params = io.Params(fromdict={"limits": {"rows": 3}})
job = io.Snakemake(io.InputFiles(), io.OutputFiles(), params, io.Wildcards(), 1, io.ResourceList(), io.Log(), {}, "", 0)
assert job.params.limits == {"rows": 3}
assert "pandas.core" not in sys.modules
subprocess.run([sys.executable, "-c", sys.argv[1]], check=True)
"""
STAGE = """
import importlib.metadata
importlib.metadata.distributions = None  # pydantic would call it, to look for plugins
from pydantic import BaseModel
class Model(BaseModel):
    pass
"""


@pytest.mark.parametrize(
    ("script", "without"),
    [
        ("fetch_rows", {"httpx", "huggingface_hub", "pycurl"}),
        ("fetch_model", {"httpx", "huggingface_hub", "pycurl"}),
        ("resolve_images", {"numpy", "pyarrow", "yaml"}),
        ("convert_rows", {"numpy", "PIL", "pyarrow", "yaml"}),
        ("validate_sharegpt", {"numpy", "PIL", "pyarrow", "yaml"}),
    ],
)
def test_a_script_does_not_load_what_it_may_never_need(script: str, without: set[str]) -> None:
    program = f"import sys; import stages.{script}; print(*sys.modules)"
    call = [sys.executable, "-c", program]
    loaded = subprocess.run(call, cwd=SCRIPTS, capture_output=True, text=True, check=True).stdout.split()
    assert without & set(loaded) == set()


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_loads_at_its_start_only_the_slow_packages_that_it_always_needs(stage: str) -> None:
    reached, waiting = set[str](), [f"stages.{stage}"]
    while waiting:
        module = waiting.pop()
        if module not in reached:
            reached.add(module)
            waiting += imported_by(module)
    slow = {package: name for name in reached for package in slow_packages(name)}
    assert set(slow) == LOADED_AT_START.get(stage, set()), slow


def slow_packages(name: str) -> set[str]:
    """Return the packages of TAKE_SECONDS that the import of a module loads, if it is one of another project."""
    package = name.partition(".")[0]
    for loads in (name, package):
        if loads in ALSO_LOADED:
            return ALSO_LOADED[loads]
    return {package} & TAKE_SECONDS


@cache
def imported_by(module: str) -> list[str]:
    """Return the modules that the import of one of ours loads itself; [] for one of another project."""
    place = SCRIPTS.joinpath(*module.split("."))
    file = next((path for path in (place.with_suffix(".py"), place / "__init__.py") if path.is_file()), None)
    return [] if file is None else [*modules_named(ast.parse(file.read_text())), module.rpartition(".")[0] or module]


def modules_named(code: ast.AST) -> Iterator[str]:
    """Yield the modules that statements import as they run: none in a function, or for types alone."""
    for node in ast.iter_child_nodes(code):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            yield from modules_named(ast.Module(node.orelse, []))
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from modules_named(node)


def test_a_job_is_prepared_without_pandas_and_runs_without_a_search_for_plugins() -> None:
    subprocess.run([sys.executable, "-c", MAIN_PROCESS, STAGE], cwd=SCRIPTS, check=True)
