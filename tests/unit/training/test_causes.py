"""The cause of a failure in the trainers' log; logs of real failures are in the stages' tests."""

import time
from pathlib import Path

from vlmflow.training.failures import failure_of


def test_a_long_progress_bar_does_not_hide_the_cause_and_costs_no_time(tmp_path: Path) -> None:
    """A bar has no line end; patterns took quadratic time on it, minutes for one evaluation."""
    log = tmp_path / "trainer.log"
    bar = "\r".join(f"Val: {count}/100000 [00:00<00:00, 9.9it/s]" for count in range(100_000))
    log.write_text(f"{bar}\n{'x' * 1_000_000}\nValueError: the cause\n")
    began = time.monotonic()
    failure = failure_of(1, log, 0, "train r")
    assert failure.cause == "train r: ValueError: the cause"
    assert time.monotonic() - began < 10
