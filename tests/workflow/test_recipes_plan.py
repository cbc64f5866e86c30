"""Each recipe plans on rows in its own data block, without a network and without a GPU."""

import json
import sys
from pathlib import Path

import pytest

from forked_snakemake import called
from workflow_runs import ROOT

RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


def plan(file: Path, folder: Path) -> tuple[int, str]:
    call = [sys.executable, "-m", "snakemake", "--snakefile", str(ROOT / "Snakefile"), "--directory", str(folder)]
    done = called([*call, "-n", "--cores", "64", "--configfile", str(file)])
    return done.returncode, done.stdout + done.stderr


QUICK = ("8b-lora-80gb", "32b-qlora-80gb")


@pytest.mark.parametrize(
    "file",
    [pytest.param(file, id=file.stem, marks=[] if file.stem in QUICK else [pytest.mark.slow]) for file in RECIPES],
)
def test_a_recipe_plans(file: Path, tmp_path: Path) -> None:
    """With nothing but rows and pictures where it says."""
    turns = [{"from": "human", "value": "<image>\nWhat is it?"}, {"from": "gpt", "value": "A cube."}]
    rows = [json.dumps({"image": f"{number}.png", "conversations": turns}) for number in range(9)]
    (tmp_path / "my-rows.jsonl").write_text("\n".join(rows))
    (tmp_path / "my-pictures").mkdir()
    code, said = plan(file, tmp_path)
    assert code == 0, said[-4000:]
    for rule in ("convert_rows", "fetch_model_files", "estimate_run", "estimate_page", "train_smoke", "publish_merged"):
        assert f"{rule} " in said


def test_a_recipe_without_its_rows_says_so(tmp_path: Path) -> None:
    code, said = plan(RECIPES[0], tmp_path)
    assert code != 0
    assert said.splitlines()[-2].endswith("my-rows.jsonl does not exist")
    (tmp_path / "my-rows.jsonl").write_text("{}")
    code, said = plan(RECIPES[0], tmp_path)
    assert code != 0
    assert said.splitlines()[-2] == "datasets.my-rows.image_roots: no folder my-pictures"
