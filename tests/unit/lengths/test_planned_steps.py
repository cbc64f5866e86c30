"""How rows are cut into micro-batches, on random lengths; that they train the same is in the stages' tests."""

import random
import time

import pytest

from vlmflow.lengths.steps import FEWEST_TOKENS, Planner, Step

KINDS = {
    "fire": lambda draw, most: round(draw.gauss(616, 200)),
    "uniform": lambda draw, most: draw.randint(10, most),
    "long tail": lambda draw, most: round(200 * draw.paretovariate(1.1)),
    "short and long": lambda draw, most: draw.choice([300, most - 1]),
    "exponential": lambda draw, most: round(draw.expovariate(1 / 900)),
}


def drawn(seed: int) -> tuple[Planner, int]:
    """Return a planner of random rows, of at most a micro-batch each; and the rows of a process."""
    draw = random.Random(seed)
    processes, each, most = draw.choice([1, 2, 4, 8]), draw.choice([16, 32, 64]), draw.choice([8192, 16384, 32768])
    length = KINDS[draw.choice(list(KINDS))]
    sizes = [min(most, max(5, length(draw, most))) for _ in range(processes * each)]
    return Planner(sizes, processes, most), each


def check(planner: Planner, step: Step, rows: int) -> None:
    """Check that each row is in one micro-batch, none is too large, and processes have equally many."""
    assert sorted(row for batches in step for batch in batches for row in batch) == list(range(rows))
    assert len(step) == planner.processes
    assert len({len(batches) for batches in step}) == 1
    for batch in (batch for batches in step for batch in batches):
        assert batch
        assert len(batch) == 1 or planner.tokens(batch) <= planner.most


@pytest.mark.parametrize("seed", range(200))
def test_a_plan_is_near_the_least_that_any_could_cost(seed: int) -> None:
    """Within a tenth; a row that fills a micro-batch may leave little to another one, which costs its least."""
    planner, each = drawn(seed)
    rows = planner.processes * each
    step = planner.step(range(rows))
    check(planner, step, rows)
    assert step == planner.step(random.Random(seed).sample(range(rows), rows)), "the order of rows does not matter"
    cost = sum(planner.cost(together) for together in zip(*step, strict=True))
    sizes = planner.sizes
    least = max(sum(sizes) / planner.processes, max(sizes), FEWEST_TOKENS)
    spare = FEWEST_TOKENS if max(sizes) > planner.most / 2 else 0
    assert cost <= 1.1 * least + spare


@pytest.mark.parametrize("seed", range(40))
def test_padded_rows_are_of_similar_length(seed: int) -> None:
    planner, each = drawn(seed)
    padded = Planner(planner.sizes, planner.processes, planner.most, padded=True)
    rows = planner.processes * each
    step = padded.step(range(rows))
    check(padded, step, rows)
    one_each = sum(
        max(FEWEST_TOKENS, *planner.sizes[at : at + planner.processes]) for at in range(0, rows, planner.processes)
    )
    assert sum(padded.cost(together) for together in zip(*step, strict=True)) <= one_each


def test_rows_above_the_number_and_few_rows_stand_alone() -> None:
    planner = Planner([20_000, 500, 500, 9_000], 2, 8192)
    step = planner.step([0, 1, 2, 3])
    check(planner, step, 4)
    assert sorted(map(len, (batch for batches in step for batch in batches))) == [1, 1, 2] or len(step[0]) == 2
    assert planner.step([1, 2]) == [[[1]], [[2]]]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("rows", "processes"), [(5, 2), (3, 2), (1, 2), (9, 4), (33, 2)])
@pytest.mark.parametrize("tokens", [10, 600, 1025])
def test_an_evaluation_may_have_any_number_of_rows(rows: int, processes: int, tokens: int, padded: bool) -> None:
    step = Planner([tokens] * rows, processes, 1024, padded).step(range(rows))
    assert sorted(row for batches in step for batch in batches for row in batch) == list(range(rows))
    counts = [len(batches) for batches in step]
    assert max(counts) - min(counts) <= 1
    assert all(len(batch) == 1 or tokens * len(batch) <= 1024 for batches in step for batch in batches)


def test_an_evaluation_of_rows_that_do_not_fit_together_is_planned_in_seconds() -> None:
    begun = time.thread_time()
    step = Planner([4200] * 20_000, 1, 8192).step(range(20_000))
    assert len(step[0]) == 20_000
    assert time.thread_time() - begun < 5  # minutes, if micro-batches grew one by one


def test_three_epochs_of_a_hundred_thousand_rows_are_planned_in_seconds() -> None:
    draw = random.Random(1)
    planner = Planner([max(5, round(draw.gauss(616, 300))) for _ in range(100_000)], 4, 16_384)
    order = list(range(100_000))
    begun = time.thread_time()
    for _ in range(3):
        draw.shuffle(order)
        for at in range(0, len(order), 128):
            planner.step(order[at : at + 128])
    assert time.thread_time() - begun < 5
