"""The recipes: each fits its GPU by the estimate, and README's table of costs is what the estimate says."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from made_inputs import some_inputs
from vlmflow.config.gpus import GPUS
from vlmflow.config.model import check_config
from vlmflow.estimate.changes import FITS, share
from vlmflow.estimate.memory import memory
from workflow_runs import ROOT

RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


@pytest.fixture(scope="module")
def costs() -> object:
    sys.path.insert(0, str(ROOT / "tests" / "bench"))
    try:
        import full_run_cost
    finally:
        sys.path.pop(0)
    return full_run_cost


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_a_recipe_fits_up_to_the_max_length_that_it_names(file: Path, costs: object) -> None:
    """With rows of that length, each with one picture of the whole budget."""
    named = int(re.search(r"fits up to max_length (\d+)", file.read_text())[1])
    line = costs._of_recipe(file)
    gpu, own = GPUS[line.settings.gpu], line.settings.train.max_length
    assert costs.longest(line) == named >= own
    rows = costs.full_rows(line, own)
    assert share(costs.inputs_for(line, rows, rows), gpu) <= FITS


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_a_recipe_is_complete(file: Path) -> None:
    """Beside config.yaml it needs nothing; its comments name itself and its run."""
    both = yaml.safe_load((ROOT / "config.yaml").read_text())
    recipe = yaml.safe_load(file.read_text())
    merged = {key: both.get(key, {}) | recipe.get(key, {}) for key in both.keys() | recipe.keys()}
    ((name, run),) = recipe["runs"].items()
    settings = check_config(merged, [file]).runs[name]
    assert settings.gpu is not None
    assert f"RUN={name} CONFIG=recipes/{file.name}" in file.read_text()
    each = settings.train.per_device_batch_size * settings.train.gradient_accumulation_steps
    assert run["processes"] * each == 32


def test_the_largest_micro_batch_fits_and_a_larger_one_does_not(costs: object) -> None:
    inputs, room = some_inputs(rows=[(300, 256)] * 40), 40 * 10**9
    most = costs.largest_micro_batch(inputs, room)
    assert most is not None
    assert most % 1_024 == 0
    fits, more = (memory(replace(inputs, micro_batch_tokens=tokens)).total for tokens in (most, most + 1_024))
    assert fits <= room < more
    assert costs.largest_micro_batch(inputs, 10**12) == 131_072
    assert costs.largest_micro_batch(inputs, 15 * 10**9) is None, "the weights alone take more"
    with_long_row = some_inputs({"max_length": 65_536}, rows=[(300, 256)] * 40 + [(60_000, 0)])
    assert costs.largest_micro_batch(with_long_row, room) is None, "a row cannot be cut"


def test_each_way_has_a_recipe() -> None:
    assert [file.stem for file in RECIPES] == [
        *("32b-lora-4x80gb", "32b-qlora-80gb", "8b-full-8x80gb", "8b-lora-80gb", "8b-qlora-24gb"),
    ]


def test_the_readme_has_the_table_that_the_command_prints() -> None:
    command = [sys.executable, str(ROOT / "tests" / "bench" / "full_run_cost.py")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed.count("\n") == 8
    assert printed in (ROOT / "README.md").read_text()
