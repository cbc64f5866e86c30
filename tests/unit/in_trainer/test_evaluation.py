"""Which rows each rank evaluates; the loss is compared in the stages' tests, after real trainings."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st


def even_batches(rows: int, size: int, rank: int, ranks: int) -> Any:
    from vlmflow.in_trainer.evaluation import (  # here: it takes seconds, and all test processes read this file
        EvenBatches,
        dealt,
    )

    return EvenBatches(dealt(range(rows), size, ranks), rank)


@given(rows=st.integers(1, 40), size=st.integers(1, 5), ranks=st.integers(1, 8))
def test_each_row_is_evaluated_once_in_as_many_batches_on_each_rank(rows: int, size: int, ranks: int) -> None:
    batches = [even_batches(rows, size, rank, ranks) for rank in range(ranks)]
    assert len({len(one) for one in batches}) == 1
    own = [row for one in batches for batch in list(one)[: one.own] for row in batch]
    assert sorted(own) == list(range(rows))
    assert all(0 < len(batch) <= size for one in batches for batch in one)


@pytest.mark.parametrize(("rank", "batches", "own"), [(0, [[0, 2], [4]], 2), (1, [[1, 3], [1, 3]], 1)])
def test_a_rank_with_fewer_rows_repeats_some(rank: int, batches: list[list[int]], own: int) -> None:
    found = even_batches(5, 2, rank, 2)
    assert (list(found), found.own) == (batches, own)


def test_a_rank_without_a_row_repeats_the_first_one() -> None:
    found = even_batches(1, 2, 1, 2)
    assert (list(found), found.own) == ([[0]], 0)
