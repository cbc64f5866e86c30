"""Each recipe plans, without a network and without a GPU."""

import sys
from pathlib import Path

import pytest

from forked_snakemake import called
from workflow_runs import ROOT

RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_a_recipe_plans(file: Path, tmp_path: Path) -> None:
    call = [sys.executable, "-m", "snakemake", "--snakefile", str(ROOT / "Snakefile"), "--directory", str(tmp_path)]
    done = called([*call, "-n", "--cores", "64", "--configfile", str(file)])
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-4000:]
    for rule in ("fetch_model_files", "estimate_run", "estimate_page", "train_smoke", "publish_merged"):
        assert f"{rule} " in said
