"""Steps and rows left over, compared with what ms-swift's own samplers give."""

import json
import os
import random
import subprocess
import sys
from typing import Any

import pytest

from vlmflow.config.run_settings import TrainSettings
from vlmflow.lengths.steps import Plan, Planner, Steps, rows_left_over
from workflow_runs import ROOT

LENGTHS = [random.Random(1).choice([9, 40, 300, 777, 1024]) for _ in range(2_345)]

SHAPES = [
    {"count": count, "processes": processes, "sequence_parallel": parallel, "batch": batch, "group_by_length": grouped}
    for count in (7, 23, 64)
    for processes, parallel in ((1, 1), (2, 1), (4, 1), (4, 2), (4, 4))
    for batch in (1, 3)
    for grouped in (False, True)
    if not (grouped and parallel > 1)
]


def settings(shape: dict[str, Any], epochs: float = 2) -> TrainSettings:
    flash = {"attention": "flash_attention_2", "sequence_parallel": shape["sequence_parallel"]}
    return TrainSettings(
        epochs=epochs,
        per_device_batch_size=shape["batch"],
        gradient_accumulation_steps=2,
        group_by_length=shape["group_by_length"],
        **(flash if shape["sequence_parallel"] > 1 else {}),
    )


@pytest.fixture(scope="module")
def from_swift() -> list[Any]:
    """What tests/helpers/samplers.py makes of SHAPES."""
    given = [shape | {"lengths": LENGTHS[: shape["count"]], "passes": 2, "seed": 42} for shape in SHAPES]
    script = ROOT / "tests" / "helpers" / "samplers.py"
    done = subprocess.run(
        [sys.executable, str(script), json.dumps(given)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"USE_HF": "1", "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("number", range(len(SHAPES)))
def test_steps_and_rows_left_over_are_those_of_the_trainers_own_samplers(from_swift: list[Any], number: int) -> None:
    shape, ranks = SHAPES[number], from_swift[number]
    lengths = LENGTHS[: shape["count"]]
    count = Steps.of(len(lengths), settings(shape), shape["processes"])
    assert {len(batches) for passes in ranks for batches in passes} == {len(ranks[0][0])}
    assert count.per_epoch == max(1, -(-len(ranks[0][0]) // 2))
    assert count.total == 2 * count.per_epoch
    trained = [{row for passes in ranks for batch in passes[epoch] for row in batch} for epoch in (0, 1)]
    never = sorted(set(range(shape["count"])) - trained[0] - trained[1])
    assert rows_left_over(lengths, settings(shape), shape["processes"]) == never
    never_in_one = sorted(set(range(shape["count"])) - trained[0])
    assert rows_left_over(lengths, settings(shape, epochs=1), shape["processes"]) == never_in_one
    if not shape["group_by_length"]:
        assert count.left_over == len(never)
        assert count.rows == len(trained[0])


@pytest.mark.parametrize("number", [n for n, shape in enumerate(SHAPES) if not shape["group_by_length"]])
def test_planned_steps_have_the_rows_of_the_trainers_own_samplers(from_swift: list[Any], number: int) -> None:
    shape, ranks = SHAPES[number], from_swift[number]
    if shape["sequence_parallel"] > 1:
        return
    planner = Planner(LENGTHS[: shape["count"]], shape["processes"], 1024)
    plan = Plan(planner, shape["processes"] * shape["batch"] * 2, seed=42)
    for epoch in (0, 1):
        batches = [passes[epoch] for passes in ranks]
        of_steps = [[one[at : at + 2] for one in batches] for at in range(0, len(batches[0]), 2)]
        theirs = [sorted(row for pair in step for batch in pair for row in batch) for step in of_steps]
        assert [sorted(rows) for rows in plan.rows(epoch)] == theirs
        assert len(theirs) == plan.steps_per_epoch


@pytest.mark.parametrize("most", [1, 2, 3, 5])
@pytest.mark.parametrize("number", range(len(SHAPES)))
def test_rows_that_a_run_of_a_few_steps_does_not_reach_are_left_over(
    from_swift: list[Any], number: int, most: int
) -> None:
    """In one pass or two, as far as the steps go; each takes two batches on each rank."""
    shape, ranks = SHAPES[number], from_swift[number]
    short = settings(shape).model_copy(update={"max_steps": most})
    per_pass = max(1, -(-len(ranks[0][0]) // 2))
    steps = [min(per_pass, max(0, most - per_pass * epoch)) for epoch in (0, 1)]
    if most > 2 * per_pass:
        return  # only two passes were drawn
    trained = {
        row for passes in ranks for epoch in (0, 1) for batch in passes[epoch][: 2 * steps[epoch]] for row in batch
    }
    never = sorted(set(range(shape["count"])) - trained)
    assert rows_left_over(LENGTHS[: shape["count"]], short, shape["processes"]) == never


def test_fifty_steps_of_two_rows_train_a_hundred_of_them() -> None:
    fifty = TrainSettings(max_steps=50, gradient_accumulation_steps=1)
    assert len(rows_left_over([9] * 199, fifty, 2)) == 99
    assert len(rows_left_over([9] * 199, fifty.model_copy(update={"max_steps": 100}), 2)) == 1, "a pass and a step"
    half = TrainSettings(epochs=0.5, gradient_accumulation_steps=1)
    assert len(rows_left_over([9] * 200, half, 2)) == 100
