"""With which micro-batches a run is estimated, and what its smoke run may begin with."""

from made_inputs import some_inputs
from vlmflow.config.gpus import GPUS
from vlmflow.estimate.account import SHARE, fits_by
from vlmflow.estimate.estimate import estimate
from vlmflow.lengths.steps import FIRST, NUMBERS

ROWS = [(360, 256)] * 400
"""As long as FIRE's on average."""

AUTO = {"micro_batch_tokens": "auto", "gradient_checkpointing": "auto", "gradient_accumulation_steps": 32}


def test_auto_is_the_fastest_that_fits_the_product() -> None:
    found = estimate(some_inputs(AUTO, ROWS), "h100", None)
    room = SHARE * GPUS["h100"].memory
    needs = {(one.micro_batch_tokens, one.gradient_checkpointing): one.memory for one in found.passes}
    assert set(needs) == {(number, again) for number in NUMBERS for again in (True, False)}
    assert found.micro_batch_tokens is not None
    chosen = needs[found.micro_batch_tokens, found.gradient_checkpointing]
    assert found.memory.total == chosen <= room
    assert found.micro_batch_tokens >= 4096, "a GPU waits for Python below"
    assert found.one_row_each is not None
    assert found.one_row_each > 2
    small = estimate(some_inputs(AUTO, ROWS), "rtx-4090", None)
    assert (small.micro_batch_tokens, small.gradient_checkpointing) == (NUMBERS[0], True), "none is known to fit"


def test_a_smoke_run_begins_with_what_fits_the_gpu_at_hand() -> None:
    found = estimate(some_inputs(AUTO, ROWS), "h100", None)
    smallest, largest = (select(one.memory for one in found.passes) for select in (min, max))
    fits = fits_by(found, lambda: round(smallest / SHARE) + 1)
    assert fits is not None
    assert [one for one in found.passes if fits(one.micro_batch_tokens, one.gradient_checkpointing)] == [
        one for one in found.passes if one.memory == smallest
    ]
    everything = fits_by(found, lambda: 2 * largest)
    assert everything is not None
    assert everything(NUMBERS[-1], False)
    assert fits_by(estimate(some_inputs(), "h100", None), lambda: largest) is None, "nothing is to be found"


def test_without_a_product_auto_is_an_assumption() -> None:
    found = estimate(some_inputs(AUTO | {"gradient_checkpointing": False}), None, None)
    assert (found.micro_batch_tokens, found.gradient_checkpointing, found.one_row_each) == (FIRST, False, None)
    assert {one.gradient_checkpointing for one in found.passes} == {False}


def test_a_number_and_null_are_taken_as_they_are() -> None:
    set_to = estimate(some_inputs({"micro_batch_tokens": 3_000}), "h100", None)
    assert (set_to.micro_batch_tokens, set_to.passes) == (3_000, [])
    assert estimate(some_inputs(), "h100", None).micro_batch_tokens is None
