"""What a trainer writes down: the lines of a progress file, the losses, and the rows of its steps."""

from pathlib import Path
from typing import Any

import pytest

from vlmflow.core.errors import VlmflowError
from vlmflow.in_trainer.messages import (
    ROWS_OF_STEPS,
    End,
    RowLog,
    as_line,
    evaluated,
    last_step_begun,
    logged,
    read_event,
    read_events,
    rows_of_step,
    stalled,
)


@pytest.mark.parametrize("damaged", [b"{", b'{"event": "end"}', b"\xff\xfe{}", b"\x00\x00\x00{", b"[" * 100_000])
def test_a_damaged_line_is_named_and_costs_no_training(tmp_path: Path, damaged: bytes) -> None:
    """The advice was to remove the run folder, whose checkpoints are whole."""
    progress = tmp_path / "run" / "progress.jsonl"
    progress.parent.mkdir()
    lines = [as_line(End(step, [])).encode() for step in (1, 2)]
    progress.write_bytes(lines[0] + damaged + b"\n" + lines[1])
    with pytest.raises(VlmflowError, match=r"run/progress\.jsonl, line 2: ") as raised:
        read_events(progress)
    assert raised.value.next_step.startswith(f"remove line 2 of {progress} and run the same command again")
    progress.write_bytes(b"".join(lines))
    assert read_events(progress) == [End(1, []), End(2, [])]


def test_a_line_is_utf_8() -> None:
    """Zeros are a sign of another encoding for json."""
    line = as_line(End(1, [])).encode("utf-16-le")
    with pytest.raises(ValueError, match=r"Expecting|Invalid"):
        read_event(line)


@pytest.mark.parametrize(
    "entry", [{"eval_loss": 1.0}, {"step": "2", "eval_loss": 1.0}, {"step": 2, "eval_loss": "1"}, {"step": 2}]
)
def test_an_entry_of_another_form_counts_as_not_logged(entry: dict[str, Any]) -> None:
    history = [{"step": 1, "eval_loss": 3.0}, entry, {"step": 3, "eval_loss": 3.0}]
    assert logged(history, "eval_loss") == [(1, 3.0), (3, 3.0)]
    assert [evaluated(history, step) for step in (1, 2, 3)] == [True, False, True]
    assert stalled(history, 1)
    assert not stalled(history, 2)


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
