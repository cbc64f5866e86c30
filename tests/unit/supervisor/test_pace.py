"""The time of a step, from the steps of a training: what is fixed, and what grows with its tokens."""

from random import Random

import pytest

from vlmflow.in_trainer.messages import Begin, End, Event, Log
from vlmflow.supervisor.smoke import evaluation_seconds, fitted_pace, timed_steps

FIXED, PER_TOKEN = 0.5, 1e-3


def progress(tokens: list[int], noise: float = 0.0, evaluate_every: int = 0) -> list[Event]:
    """Give the events of a training: steps that take FIXED + tokens × PER_TOKEN, the first one longer.

    noise: the largest share by which a step is off. An evaluation takes 7 seconds, and saving after it 3.
    """
    random = Random(1)
    events: list[Event] = [Begin(0, len(tokens), 0, 1, "NOT_PARALLEL", "cpu")]
    time, done = 20.0, 0
    for step, count in enumerate(tokens, start=1):
        time += (FIXED + PER_TOKEN * count) * (1 + random.uniform(-noise, noise))
        done += count
        events.append(Log(time, step, len(tokens), done, loss=1.0))
        if evaluate_every and step % evaluate_every == 0:
            time += 7
            events.append(Log(time, step, len(tokens), done, eval_loss=1.0))
            time += 3
    return [*events, End(len(tokens), [0])]


def test_both_parts_are_found() -> None:
    pace = fitted_pace(timed_steps(progress([100, 900, 400, 2_000, 700])))
    assert pace is not None
    assert pace.step_seconds == pytest.approx(FIXED)
    assert pace.token_seconds == pytest.approx(PER_TOKEN)
    assert pace.steps == 4, "the first step also loads kernels"


def test_steps_in_which_it_saved_do_not_count() -> None:
    events = progress([500] * 9, evaluate_every=3)
    assert [seconds for _, seconds in timed_steps(events)] == pytest.approx([1.0] * 6)
    assert list(evaluation_seconds(events)) == pytest.approx([7.0] * 3)


def test_each_session_has_a_first_step() -> None:
    events = [*progress([500] * 4), *progress([500] * 3)]
    assert len(timed_steps(events)) == 3 + 2
    assert [seconds for _, seconds in timed_steps(events)] == pytest.approx([1.0] * 5)


def test_noise_and_a_slow_step_move_it_little() -> None:
    tokens = [200 + 137 * number % 1_800 for number in range(20)]
    steps = timed_steps(progress(tokens, noise=0.05))
    steps[3] = (steps[3][0], 60.0)
    pace = fitted_pace(steps)
    assert pace is not None
    for count in (300, 3_000):
        predicted = pace.step_seconds + count * pace.token_seconds
        assert predicted == pytest.approx(FIXED + count * PER_TOKEN, rel=0.05)


def test_both_parts_stay_positive() -> None:
    """Longer steps that are quicker by chance, or no time left without tokens, are no reason for negative times."""
    falling = fitted_pace([(100, 2.0), (200, 1.0), (300, 0.5)])
    rising = fitted_pace([(100, 0.1), (200, 1.0), (300, 2.5)])
    same = fitted_pace([(100, 1.0), (100, 3.0), (100, 2.0)])
    assert falling is not None
    assert rising is not None
    assert same is not None
    assert (falling.token_seconds, falling.step_seconds) == (0.0, 1.0)
    assert rising.step_seconds >= 0
    assert rising.token_seconds == pytest.approx(3.6 / 600)
    assert (same.token_seconds, same.step_seconds) == (pytest.approx(0.02), 0.0)
    assert fitted_pace([]) is None
    assert fitted_pace([(0, 1.0)]) is not None
