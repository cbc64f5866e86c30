from pathlib import Path

import pytest

from vlmflow.in_trainer.messages import ROWS_OF_STEPS, RowLog, last_step_begun, rows_of_step


def test_rows_are_read_by_rank_in_the_order_of_the_passes(tmp_path: Path) -> None:
    for rank in (0, 1):
        log = RowLog(tmp_path, rank)
        log.write(1, [[rank, 2], [3]])
        log.write(10, [[4, 5, 6, 7]])
    assert rows_of_step(tmp_path, 1) == {0: [[0, 2], [3]], 1: [[1, 2], [3]]}
    assert rows_of_step(tmp_path, 10)[1] == [[4, 5, 6, 7]]
    assert rows_of_step(tmp_path, 2) == {}
    assert last_step_begun(tmp_path) == 10


def test_a_step_that_was_trained_again_counts_once_the_last_time(tmp_path: Path) -> None:
    RowLog(tmp_path, 0).write(3, [[1]])
    RowLog(tmp_path, 0).write(3, [[2]])
    assert rows_of_step(tmp_path, 3) == {0: [[2]]}


@pytest.mark.parametrize("cut", range(1, 9))
def test_a_line_that_a_kill_cut_does_not_count(tmp_path: Path, cut: int) -> None:
    """It might be read as the step of its first digits, or with fewer rows; the next session removes it."""
    log = RowLog(tmp_path, 0)
    log.write(3, [[1]])
    log.write(31, [[22, 7]])
    file = tmp_path / ROWS_OF_STEPS / "rank-0.txt"
    file.write_bytes(file.read_bytes()[:-cut])
    assert rows_of_step(tmp_path, 3) == {0: [[1]]}
    assert rows_of_step(tmp_path, 31) == {}
    assert last_step_begun(tmp_path) == 3
    RowLog(tmp_path, 0).write(4, [[8]])
    assert file.read_text() == "3 1\n4 8\n"


def test_no_training_has_no_rows(tmp_path: Path) -> None:
    assert rows_of_step(tmp_path, 1) == {}
    assert last_step_begun(tmp_path) == 0


def test_a_hundred_thousand_steps_are_small(tmp_path: Path) -> None:
    """Eight rows of a rank, numbers of six digits: 6 MB."""
    RowLog(tmp_path, 0).write(100_000, [[123_456] * 4, [654_321] * 4])
    assert (tmp_path / ROWS_OF_STEPS / "rank-0.txt").stat().st_size < 64
