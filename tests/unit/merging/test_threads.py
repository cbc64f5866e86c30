"""Tasks over threads: in order, bounded, and done with when one fails."""

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

from vlmflow.merging.tensors import WAITING_PER_THREAD, run_in_order


@pytest.mark.parametrize("threads", [1, 3])
def test_results_are_in_order_and_tasks_are_created_late(threads: int) -> None:
    made = 0

    def tasks() -> Iterator[Callable[[], int]]:
        nonlocal made
        for number in range(50):
            made += 1
            yield lambda number=number: (time.sleep(0.001 * (number % 3)), number)[1]

    for done, number in enumerate(run_in_order(tasks(), threads)):
        assert number == done
        assert made <= done + 1 + threads * WAITING_PER_THREAD
    assert made == 50


def test_a_failing_task_ends_the_work() -> None:
    begun: list[int] = []

    def task(number: int) -> None:
        begun.append(number)
        time.sleep(2 * number)  # time to call off the third
        raise ValueError(f"task {number}")

    before = threading.active_count()
    with pytest.raises(ValueError, match="task 0"):
        list(run_in_order((partial(task, number) for number in range(1000)), 1))
    # The second may have begun when the first had failed; the third, handed out already, did not.
    assert begun in ([0], [0, 1])
    assert threading.active_count() == before


def test_torch_uses_one_core_per_task_and_its_own_number_afterwards() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    assert set(run_in_order([torch.get_num_threads] * 5, 3)) == {1}
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)
