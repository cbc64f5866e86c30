import math

import pytest

from vlmflow.in_trainer.events import FEWEST, IN_A_ROW, fault_of
from vlmflow.in_trainer.messages import Fault

USUAL_LOSS = [1.0 + step % 7 / 10 for step in range(60)]


def fault(losses: list[float], gradient: bool = True, warmup: int = 5) -> tuple[Fault, int] | None:
    return fault_of(list(enumerate(losses, start=1)), gradient, warmup)


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_is_found_at_once_also_in_the_warm_up(loss: float) -> None:
    assert fault([12.0, loss], warmup=100) == (Fault.LOSS, 2)


def test_a_gradient_without_a_norm_is_found_at_once() -> None:
    assert fault([12.0], gradient=False) == (Fault.GRADIENT, 1)


@pytest.mark.parametrize("lost", [7.5, 11.9, 200.0])
def test_a_model_that_is_destroyed_is_found_after_some_steps(lost: float) -> None:
    """Such losses stay: those of single tokens without their context, or of guessing."""
    for count in range(1, IN_A_ROW):
        assert fault(USUAL_LOSS + [lost] * count) is None
    assert fault(USUAL_LOSS + [lost] * IN_A_ROW) == (Fault.EXPLODED, 61)


@pytest.mark.parametrize(
    "losses",
    [
        [*USUAL_LOSS, 1.2, 15.0, 1.1, 14.0, 13.0, 12.0, 1.0, 15.0],
        [13.0] * 20 + [12.0, 14.0, 13.5, 13.9, 14.0, 13.7],
        [0.01] * 40 + [2.0] * 5,
        [3.0] * 40 + [8.0] * 5,
        [13.0 - step / 5 for step in range(60)],
        [1.0] * (FEWEST - 1) + [20.0] * IN_A_ROW,
    ],
    ids=["single answers", "an untrained model", "harder rows", "usually high", "falling", "nothing is usual yet"],
)
def test_losses_of_good_trainings_are_no_fault(losses: list[float]) -> None:
    assert all(fault(losses[:count]) is None for count in range(1, len(losses) + 1))


def test_losses_of_the_warm_up_may_be_anything_finite() -> None:
    losses = [1.0] * 20 + [20.0] * IN_A_ROW
    assert fault(losses, warmup=21) is None
    assert fault(losses, warmup=20) == (Fault.EXPLODED, 21)
