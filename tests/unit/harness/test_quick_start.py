"""Expensive modules that a start does not load because it does not need them."""

import subprocess
import sys

import pytest

from workflow_runs import ROOT

SCRIPTS = ROOT / "scripts"

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


def test_a_job_is_prepared_without_pandas_and_runs_without_a_search_for_plugins() -> None:
    subprocess.run([sys.executable, "-c", MAIN_PROCESS, STAGE], cwd=SCRIPTS, check=True)
