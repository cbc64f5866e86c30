import logging
from typing import Any

import msgspec
import pytest

from made_accounts import some_report
from made_inputs import some_inputs
from vlmflow.core.errors import VlmflowError
from vlmflow.estimate.account import Compared, Estimate, compare
from vlmflow.estimate.changes import in_words, judge
from vlmflow.estimate.estimate import estimate

GB = 10**9


def of(gpu: str | None, train: dict[str, Any] | None = None, **others: Any) -> Estimate:
    return estimate(some_inputs(train, **others), gpu, None)


def test_a_run_that_does_not_fit_is_refused_with_what_would_make_it_fit() -> None:
    found = of("rtx-4090", {"per_device_batch_size": 4})
    with pytest.raises(VlmflowError) as refusal:
        judge(found, "mine", on_gpu=True, ignored=False)
    error = refusal.value
    assert f"mine: {found.memory.total / GB:.1f} GB on each of 1 GPU" in error.cause
    assert "GeForce RTX 4090's 24 GB: " in error.cause
    assert f"weights {found.memory.weights / GB:.1f}" in error.cause
    pair = "train.per_device_batch_size: 1, train.gradient_accumulation_steps: 32; tuner: qlora"
    assert error.next_step.startswith(f"cheapest first: {pair} (")
    assert "runs.NAME.estimate: ignore" in error.next_step


def test_several_nodes_are_named_with_the_processes_of_each() -> None:
    found = of("a40", tuner="full", nodes=2, processes=2)
    assert "on each of 4 GPUs (2 nodes × 2 processes) by the estimate" in in_words(found, "mine", on_gpu=True)
    assert "each of 4 processes (2 nodes × 2 processes)" in in_words(found, "mine", on_gpu=False)


def test_an_account_without_nodes_is_of_one() -> None:
    """As estimates were written before there were several."""
    content = msgspec.to_builtins(of("h100", nodes=2))
    assert msgspec.convert(content, Estimate).nodes == content.pop("nodes") == 2
    assert msgspec.convert(content, Estimate).nodes == 1


def test_estimate_ignore_lets_it_start_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    judge(of("rtx-4090", {"per_device_batch_size": 4}), "mine", on_gpu=True, ignored=True)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "It may not fit" in record.message


def test_a_run_between_both_thresholds_starts_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    found = of("rtx-4090")
    on = found.on("rtx-4090")
    assert on is not None
    assert 0.9 < on.memory_share < 1.1
    judge(found, "mine", on_gpu=True, ignored=False)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


@pytest.mark.parametrize(
    ("gpu", "on_gpu", "said"),
    [
        ("h200", True, "of H200 SXM 141 GB's 141 GB"),
        (None, True, "names no product"),
        ("rtx-4090", False, "of main memory for each of 1 process"),
    ],
)
def test_all_others_start_with_one_line(
    gpu: str | None, on_gpu: bool, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """On the CPU nothing is refused."""
    with caplog.at_level(logging.INFO, "vlmflow"):
        judge(of(gpu, {"per_device_batch_size": 4} if not on_gpu else None), "mine", on_gpu=on_gpu, ignored=False)
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert said in record.message


def named(found: list[Compared]) -> dict[str, Compared]:
    return {one.name: one for one in found}


def test_estimate_and_measured_are_compared() -> None:
    found = of("h100")
    on = found.on("h100")
    assert on is not None
    speed = found.tokens / on.slow.seconds
    report = some_report(
        device="NVIDIA H100",
        peak_memory=[found.memory.total * 2, found.memory.total],
        tokens_per_second=speed / 2,
        target=found.steps,
        steps=found.steps,
        seconds=on.slow.seconds * 2,
    )
    rows = named(compare(found, report))
    assert rows["memory of one GPU"].error == pytest.approx(-0.5)
    assert rows["speed of all GPUs"].error == pytest.approx(1.0)
    assert rows["optimizer steps"].error == 0
    assert rows["training and evaluations"].error == pytest.approx(-0.5)


def test_a_measured_value_within_the_range_is_no_error() -> None:
    assert Compared("x", "hours", 2.0, 3.0, up_to=4.0).error == 0
    assert Compared("x", "hours", 2.0, 8.0, up_to=4.0).error == -0.5
    assert Compared("x", "hours", 2.0, None).error is None
    assert Compared("x", "hours", None, 2.0).error is None


def test_a_smoke_run_has_neither_the_steps_nor_the_hours_of_the_run() -> None:
    found = of("h100")
    rows = named(compare(found, some_report(device="NVIDIA H100", target=found.steps + 1)))
    assert rows.keys() == {"memory of one GPU", "speed of all GPUs"}
    assert named(compare(found, some_report(device="cpu", target=found.steps))).keys() == {"optimizer steps"}
