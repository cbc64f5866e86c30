"""The gate before a full training, and the time of a step, from the steps of a training."""

import math
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from msgspec import structs

from browser import Browser
from made_accounts import MADE_OF, MERGE, some_report
from made_accounts import some_training as job
from vlmflow.config.run_settings import SmokeSettings
from vlmflow.config.strategies import QLORA
from vlmflow.core.account import read_account, write_account
from vlmflow.core.errors import VlmflowError
from vlmflow.in_trainer.messages import Begin, End, Event, Log
from vlmflow.lengths.count import RowLength
from vlmflow.lengths.steps import Steps
from vlmflow.lengths.summary import NamedRow
from vlmflow.reports.former_trainings import MadeOf
from vlmflow.reports.training_pages import gate_page
from vlmflow.supervisor.report import Best, Check, EpochPlan, Gate, Pace, StepPlan
from vlmflow.supervisor.smoke import (
    SmokeRows,
    capped,
    choose_rows,
    estimate,
    evaluation_seconds,
    fitted_pace,
    judge,
    pace_of,
    refuse_failed,
    timed_steps,
    with_passes,
)
from vlmflow.swift.arguments import Passes
from vlmflow.swift.model_layers import Layers

LENGTHS = [RowLength(f"row-{number}", number * 10, number * 10 + 10, 100 + number) for number in range(50)]
VAL = [RowLength(f"val-{number}", number * 10, number * 10 + 10, 120 + number) for number in range(5)]
CHOSEN = SmokeRows(LENGTHS[-8:], VAL)


def gate_of(losses: list[float], steps: int = 10, **changes: Any) -> Gate:
    """Give the gate of a smoke run with these losses, one per step."""
    smoke = some_report(losses=list(enumerate(losses, start=1)), **changes)
    return judge(smoke, progress(losses), CHOSEN, LENGTHS, VAL, job(max_steps=steps), {}, MERGE)


def progress(losses: list[float]) -> list[Event]:
    """Give the events of a smoke run with a step per loss: 400 tokens in 5 seconds."""
    begin: Event = Begin(0, len(losses), 0, 4, "DISTRIBUTED", "cpu")
    return [begin, *(Log(5.0 * step, step, 8, 400 * step, loss=loss) for step, loss in enumerate(losses, start=1))]


def failed(gate: Gate) -> list[str]:
    return [check.check for check in gate.checks if not check.passed]


def test_a_good_smoke_run_opens_the_gate() -> None:
    gate = gate_of([5, 6, 4, 3, 3, 2, 2, 2])
    assert gate.passed
    refuse_failed(gate, "run")
    assert gate.lengths.longest[:2] == [NamedRow("row-49", 149, 0), NamedRow("row-48", 148, 0)]
    assert "the gate is open" in gate_page("run", gate, MADE_OF)


def layers(trained: int = 0, kind: str = "Linear4bit", bits: int = 4) -> list[Layers]:
    """Give the layers of a model whose vision tower and language model have one kind each, and an output head."""
    up, head = ("model.language_model.layers.*.mlp.up_proj", "lm_head")
    return [
        Layers("model.visual.blocks.*.attn.qkv", "Linear", 2, 1_000, 2_000, trained),
        Layers("model.visual.merger.linear_fc1", "Linear", 1, 100, 200, 0),
        Layers(up, kind, 2, 1_000, 1_000 * bits // 8, 64),
        Layers(head, "Linear", 1, 500, 1_000, 0),
    ]


def test_a_frozen_part_that_is_trained_closes_the_gate() -> None:
    losses = [5, 4, 3, 2, 2, 2, 2, 2]
    assert gate_of(losses, layers=layers()).passed
    (check,) = (check for check in gate_of(losses, layers=layers(trained=8)).checks if not check.passed)
    assert check.check == "vision_tower, aligner of the model is frozen"
    assert check.detail == "model.visual.blocks.*.attn.qkv is trained"


@pytest.mark.parametrize(
    ("kind", "bits", "opens"), [("Linear4bit", 4, True), ("Linear", 16, False), ("Linear4bit", 8, False)]
)
def test_qlora_needs_a_base_in_4_bit(kind: str, bits: int, opens: bool) -> None:
    """The class of the loaded layers, and their bytes; the output head is not quantised."""
    full = replace(job(max_steps=10), tuner=QLORA)
    smoke = some_report(losses=list(enumerate([5, 4, 3, 2, 2, 2, 2, 2], start=1)), layers=layers(0, kind, bits))
    events = progress([5, 4, 3, 2, 2, 2, 2, 2])
    gate = judge(smoke, events, CHOSEN, LENGTHS, VAL, full, {}, MERGE)
    assert gate.passed == opens
    (check,) = (check for check in gate.checks if check.check == "the base is quantised")
    said = "2 layers in 4 bit, 0.0 MB" if opens else "; not: model.language_model.layers.*.mlp.up_proj"
    assert said in check.detail


def test_the_page_shows_hostile_values_as_texts(tmp_path: Path) -> None:
    hostile = "<script>document.title='taken'</script>"
    gate = gate_of([5, 4, 3, 2, 2, 2, 2, 2])
    gate.checks[1] = Check(gate.checks[1].check, False, hostile)
    gate.lengths.longest[0] = NamedRow(hostile, 149, 0)
    gate = structs.replace(gate, passed=False)
    file = tmp_path / "page.html"
    file.write_text(gate_page(hostile, gate, MadeOf(hostile, hostile, [(hostile, hostile)])))
    with Browser(tmp_path / "profile") as browser:
        browser.check_page(file, f"{hostile}: the gate is closed")
        text = browser.evaluate("document.body.innerText")
        marks = browser.evaluate("[...document.querySelectorAll('.mark')].map(m => m.ariaLabel)")
    assert text.count(hostile) == 8, (
        "as the run, in the name of its other page, as a detail, as a row; 4 in what it is made of"
    )
    assert "1 of 7 checks failed" in text
    assert [mark == "passed" for mark in marks] == [check.passed for check in gate.checks]


@pytest.mark.parametrize(
    ("changes", "check"),
    [
        ({"losses": [5.0, math.nan, 2.0, 2.0]}, "every loss is a finite number"),
        ({"losses": []}, "every loss is a finite number"),
        ({"losses": [5.0 + step for step in range(8)]}, "the loss falls"),
        ({"best": Best(8, math.inf)}, "validation loss is a finite number"),
        ({"world_size": 1}, "4 processes train together"),
    ],
)
def test_a_bad_smoke_run_closes_it_with_the_reason(changes: dict[str, Any], check: str) -> None:
    """A loss that is not a number, or does not fall, is found in minutes, not days."""
    gate = gate_of(**{"losses": [5, 4, 3, 2]} | changes)
    assert check in failed(gate)
    assert not gate.passed
    assert "the gate is closed" in gate_page("run", gate, MADE_OF)
    with pytest.raises(VlmflowError, match="the gate is closed: ") as error:
        refuse_failed(gate, "run")
    assert check in error.value.cause


def test_a_gate_that_does_not_say_what_auto_is_stays_closed() -> None:
    """One of before has no `passes`; the run would train one row per pass, in the folder of planned ones."""
    gate = gate_of([5, 4, 3, 2, 2, 2, 2, 2])
    auto, plain = (job(max_steps=10, micro_batch_tokens=tokens) for tokens in ("auto", None))
    with pytest.raises(VlmflowError, match="does not say what micro_batch_tokens: auto is"):
        with_passes(auto, gate, "run")
    assert with_passes(plain, gate, "run").micro_batch_tokens is None
    found = Passes(2048, gradient_checkpointing=True)
    assert with_passes(auto, structs.replace(gate, passes=found), "run").micro_batch_tokens == 2048


def test_a_gate_with_micro_batches_of_no_tokens_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "gate.json"
    gate = structs.replace(gate_of([5, 4, 3, 2]), passes=Passes(0, gradient_checkpointing=True))
    write_account(file, gate)
    with pytest.raises(VlmflowError, match=r"passes\.micro_batch_tokens: Expected `int` >= 1"):
        read_account(file, Gate)


def test_the_longest_rows_are_trained_on_first(tmp_path: Path) -> None:
    """A run that survives its longest rows does not run out of memory on one of them later."""
    full, smoke = job(seed=1), SmokeSettings(steps=4, longest=3, sample=5)
    chosen = choose_rows(LENGTHS, VAL, full, smoke)
    assert [row.tokens for row in chosen.train[:3]] == [149, 148, 147]
    assert [row.tokens for row in chosen.val] == [124, 123, 122]
    assert len({row.id for row in chosen.train}) == 8
    assert chosen == choose_rows(LENGTHS[::-1], VAL[::-1], full, smoke)
    assert chosen != choose_rows(LENGTHS, VAL, job(seed=2), smoke)
    assert len(choose_rows(LENGTHS, VAL, full, SmokeSettings(steps=9, longest=100, sample=100)).train) == 50


def test_every_chosen_row_is_trained_on() -> None:
    """The longest rows have priority over the sample; too few steps for them are refused."""
    small = job(processes=1, per_device_batch_size=1, gradient_accumulation_steps=2)
    assert len(choose_rows(LENGTHS, VAL, small, SmokeSettings(steps=10, longest=16, sample=48)).train) == 20
    with pytest.raises(VlmflowError, match="to 8 or more"):
        choose_rows(LENGTHS, VAL, small, SmokeSettings(steps=7, longest=16, sample=48))


@pytest.mark.parametrize(
    ("rows", "processes", "epochs", "accumulation", "expected"),
    [
        (51, 2, 1, 1, Steps(25, 25, 50, 1)),
        (55, 2, 4, 1, Steps(108, 27, 54, 1)),
        (51, 2, 1, 8, Steps(4, 4, 50, 1)),
        (3, 2, 1, 8, Steps(1, 1, 2, 1)),
        (50, 1, 0.5, 1, Steps(25, 50, 50, 0)),
    ],
)
def test_steps_are_counted_as_the_trainer_counts_them(
    rows: int, processes: int, epochs: float, accumulation: int, expected: Steps
) -> None:
    settings = job(epochs=epochs, gradient_accumulation_steps=accumulation).settings
    assert Steps.of(rows, settings, processes) == expected


def test_a_smoke_run_is_no_longer_than_the_full_one(caplog: pytest.LogCaptureFixture) -> None:
    smoke = SmokeSettings()
    assert capped(smoke, job(max_steps=20), 50) == smoke
    with caplog.at_level("INFO", "vlmflow"):
        short = capped(smoke, job(max_steps=6, processes=1, gradient_accumulation_steps=1), 50)
    assert (short.steps, short.longest) == (6, 6)
    assert "the smoke run takes 6, not smoke.steps = 20" in caplog.text
    assert capped(smoke, job(max_steps=1), 50).steps == 4


def test_few_steps_are_judged_by_the_validation_loss() -> None:
    """Single steps differ by their rows: a good run of 4 steps was refused."""
    rising = [12.79, 12.9, 12.9, 13.0]
    assert gate_of(rising, 4).passed
    assert failed(gate_of(rising, 4, eval_losses=[(2, 3.0), (4, 3.1)])) == ["the loss falls"]
    rounding = [(2, 11.74766554), (4, 11.74766432)]
    assert failed(gate_of(rising, 4, eval_losses=rounding)) == ["the loss falls"]


def test_the_full_run_is_estimated_from_the_measured_speed() -> None:
    rows_per_step = {"per_device_batch_size": 1, "gradient_accumulation_steps": 2}
    full = job(max_steps=None, epochs=2, checkpoint_steps=10, evaluation_steps=10, processes=4, **rows_per_step)
    mean = sum(row.tokens for row in LENGTHS) / 50
    estimated = estimate(LENGTHS, VAL, full, Pace(0.0, 0.01, 5))
    assert estimated.steps == 12, "each of 4 processes takes 12 of the 50 rows, two at a time, in both epochs"
    assert estimated.left_over == ["row-48", "row-49"]
    assert (estimated.rows_left_over, estimated.evaluations) == (2, 2)
    assert "2 of 50 rows left over, not trained" in estimated.readable
    assert estimated.tokens == round(12 * 8 * mean)
    assert estimated.evaluated_tokens == 2 * sum(row.tokens for row in VAL), "checkpoints at step 10 and at the end"
    assert estimated.seconds == round((12 * 8 * mean + estimated.evaluated_tokens / 2) / 100)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_steps": 6, "evaluation_steps": 100}, "6 steps, 1 evaluation: nothing to choose from; "),
        ({"max_steps": 44}, "44 steps, 11 evaluations; "),
        ({"epochs": 0.5, "early_stop_after": 2}, "at most 25 steps, 13 evaluations; "),
        ({"max_steps": 1}, "1 step, 1 evaluation: nothing to choose from; "),
    ],
)
def test_the_gate_says_what_there_is_to_choose_from(settings: dict[str, Any], said: str) -> None:
    full = job(gradient_accumulation_steps=1, processes=1, **settings)
    assert estimate(LENGTHS, VAL, full, Pace(0.0, 0.01, 5)).readable.startswith(said)


def test_rows_that_the_run_does_not_reach_are_left_over() -> None:
    """Ten steps of two rows train 20 of the 50; with 30 steps a second pass has begun, and none is left."""
    full = job(max_steps=10, gradient_accumulation_steps=1, processes=2)
    estimated = estimate(LENGTHS, VAL, full, Pace(0.0, 0.01, 5))
    assert estimated.rows_left_over == 30
    assert len(set(estimated.left_over)) == 20
    assert estimated.readable.endswith("; 30 of 50 rows left over, not trained")
    more = replace(full, settings=full.settings.model_copy(update={"max_steps": 30}))
    assert estimate(LENGTHS, VAL, more, Pace(0.0, 0.01, 5)).left_over == []


def test_the_estimate_is_right_for_rows_that_are_shorter_than_those_of_the_smoke_run() -> None:
    """A step takes 0.8 s and 2 ms per token; the smoke run's rows are 2,000 tokens long, those of the full run 100."""
    long, short = ([RowLength(f"row-{n}", n, n + 1, tokens) for n in range(400)] for tokens in (2_000, 100))
    mixed = long[:40] + short[40:]
    steps = {"checkpoint_steps": 100, "evaluation_steps": 500}
    full = job(max_steps=None, epochs=1, processes=1, gradient_accumulation_steps=1, per_device_batch_size=1, **steps)
    times, tokens, events = 1.0, 0, [Begin(0, 20, 0, 1, "NOT_PARALLEL", "cpu")]
    for step, row in enumerate([*long[:16], *short[:14]], start=1):
        times += 0.8 + 0.002 * row.tokens
        tokens += row.tokens
        events.append(Log(times, step, 20, tokens, loss=1.0))
    report = some_report(seconds=times, tokens=tokens)
    expected = sum(0.8 + 0.002 * row.tokens for row in mixed) + 0.5 * 5 * (0.8 + 0.002 * 120)
    estimated = estimate(mixed, VAL, full, pace_of(report, events, VAL, full))
    assert estimated.seconds == pytest.approx(expected, rel=0.02)
    one_speed = sum(row.tokens for row in mixed) * times / tokens
    assert abs(one_speed / expected - 1) > 0.25, "what one mean speed would have said"


def test_an_evaluation_costs_what_it_cost_in_the_smoke_run() -> None:
    full = job(processes=4, gradient_accumulation_steps=1, per_device_batch_size=1)
    events = progress([2.0] * 8)
    last = events[-1]
    assert isinstance(last, Log)
    events.append(Log(last.time + 6.0, 8, 8, last.tokens, eval_loss=2.0))
    pace = pace_of(some_report(), events, VAL, full)
    as_trained = 2 * pace.step_seconds + sum(row.tokens for row in VAL) * pace.token_seconds
    assert pace.evaluation_cost * as_trained == pytest.approx(6.0), "5 rows on 4 processes are 2 batches"
    assert pace_of(some_report(), events[:-1], VAL, full).evaluation_cost == 0.5
    shared = job(
        processes=4,
        gradient_accumulation_steps=1,
        per_device_batch_size=1,
        sequence_parallel=2,
        attention="flash_attention_2",
    )
    as_trained += pace.step_seconds
    assert pace_of(some_report(), events, VAL, shared).evaluation_cost == pytest.approx(6.0 / as_trained), "now 3"
    assert pace_of(some_report(seconds=10.0, tokens=1_000), [], VAL, full) == Pace(0.0, 0.01, 0)


@pytest.mark.parametrize(("padding", "said"), [(None, "no padding"), (1200, "1,200 tokens of padding")])
def test_a_plan_says_that_its_rates_are_those_of_a_gpu(padding: int | None, said: str) -> None:
    """On a CPU short passes are no slower, so the words claim nothing of it."""
    plan = StepPlan(Passes(600, True), padding is not None, "digest", [EpochPlan(17, padding or 0, 0.105, 3.0)], 60)
    assert plan.in_words() == (
        f"17 micro-batches of at most 600 tokens in an epoch on each process, {said}; on a GPU 10% of the full rate, "
        "and one row per pass would take 3.0 times as long"
    )


FIXED, PER_TOKEN = 0.5, 1e-3


def timed_progress(tokens: list[int], noise: float = 0.0, evaluate_every: int = 0) -> list[Event]:
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
    pace = fitted_pace(timed_steps(timed_progress([100, 900, 400, 2_000, 700])))
    assert pace is not None
    assert pace.step_seconds == pytest.approx(FIXED)
    assert pace.token_seconds == pytest.approx(PER_TOKEN)
    assert pace.steps == 4, "the first step also loads kernels"


def test_steps_in_which_it_saved_do_not_count() -> None:
    events = timed_progress([500] * 9, evaluate_every=3)
    assert [seconds for _, seconds in timed_steps(events)] == pytest.approx([1.0] * 6)
    assert list(evaluation_seconds(events)) == pytest.approx([7.0] * 3)


def test_each_session_has_a_first_step() -> None:
    events = [*timed_progress([500] * 4), *timed_progress([500] * 3)]
    assert len(timed_steps(events)) == 3 + 2
    assert [seconds for _, seconds in timed_steps(events)] == pytest.approx([1.0] * 5)


def test_noise_and_a_slow_step_move_it_little() -> None:
    tokens = [200 + 137 * number % 1_800 for number in range(20)]
    steps = timed_steps(timed_progress(tokens, noise=0.05))
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
