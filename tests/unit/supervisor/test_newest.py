"""The newest figures of a training, and what it is doing."""

from pathlib import Path

import pytest

from vlmflow.config.run_settings import TrainSettings
from vlmflow.in_trainer.messages import STATE, Begin, End, Event, Log
from vlmflow.supervisor.progress import Newest, doing, report_line

SETTINGS = TrainSettings(checkpoint_steps=2, evaluation_steps=4)
BEGIN = Begin(0, 10, 0, 1, "NOT_DISTRIBUTED", "cpu")


def step(number: int, loss: float = 3.0) -> Log:
    return Log(2.0 * number, number, 10, 50 * number, loss=loss)


def evaluation(number: int, loss: float = 4.0) -> Log:
    return Log(2.0 * number + 1, number, 10, 50 * number, eval_loss=loss)


def test_progress_shows_speed_and_time_left_of_this_session() -> None:
    newest = Newest()
    newest.take(Begin(10, 20, 0, 1, "NOT_DISTRIBUTED", "cpu"))
    assert report_line(newest) == ""
    newest.take(Log(2.0, 11, 20, 50, loss=4.2))
    newest.take(Log(4.0, 12, 20, 99, eval_loss=5.0))
    assert report_line(newest) == "step 12/20 · loss 4.200 · val 5.000 · 2.00 s/step · 0:16 left"


def test_a_repeated_evaluation_counts_once_and_its_time_twice() -> None:
    first = [BEGIN, *map(step, range(1, 5)), evaluation(4, 5.0)]
    again = [Begin(2, 10, 100, 1, "NOT_DISTRIBUTED", "cpu"), Log(3.0, 3, 10, 150, loss=3.0)]
    newest = Newest.of([*first, *again])
    assert newest.eval_losses == {}
    assert (newest.sessions, newest.step, newest.seconds, newest.tokens) == (2, 3, 12.0, 250)
    assert newest.seconds_left == 7 * 3.0


@pytest.mark.parametrize(
    ("events", "saved", "found"),
    [
        ([BEGIN], [], "training"),
        ([BEGIN, step(1)], [], "training"),
        ([BEGIN, step(2)], [], "saving"),
        ([BEGIN, step(2)], [2], "training"),
        ([BEGIN, step(4)], [2], "evaluating"),
        ([BEGIN, step(4), evaluation(4)], [2], "saving"),
        ([BEGIN, step(4), evaluation(4)], [2, 4], "training"),
        ([BEGIN, step(10)], [], "evaluating"),
        ([BEGIN, step(10), evaluation(10)], [], "saving"),
        ([BEGIN, step(3), End(3, [])], [], "saving"),
        ([Begin(4, 10, 200, 1, "NOT_DISTRIBUTED", "cpu")], [4], "evaluating"),
    ],
)
def test_what_running_trainers_do(events: list[Event], saved: list[int], found: str, tmp_path: Path) -> None:
    for number in saved:
        (tmp_path / f"checkpoint-{number}").mkdir()
        (tmp_path / f"checkpoint-{number}" / STATE).touch()
    newest = Newest.of(events)
    assert doing(newest, SETTINGS, tmp_path, runs=True) == found
    assert doing(newest, SETTINGS, tmp_path, runs=True, begun=False) == "starting"


@pytest.mark.parametrize(
    ("events", "found"),
    [
        ([], "interrupted"),
        ([BEGIN, step(10)], "interrupted"),
        ([BEGIN, step(10), evaluation(10)], "ended"),
        ([BEGIN, step(4), evaluation(4), step(5), End(5, [])], "interrupted"),
        ([BEGIN, step(4), evaluation(4, 3.0), step(8), evaluation(8, 3.0), End(8, [])], "ended"),
    ],
)
def test_whether_a_training_ended(events: list[Event], found: str, tmp_path: Path) -> None:
    settings = SETTINGS.model_copy(update={"early_stop_after": 1})
    assert doing(Newest.of(events), settings, tmp_path, runs=False) == found
