"""A run's page beside what gate and estimate predicted."""

from pathlib import Path

import msgspec

from made_accounts import MADE_OF, leave_training, some_gate, some_report
from made_inputs import some_inputs
from vlmflow.estimate.account import NoEstimate
from vlmflow.estimate.estimate import estimate
from vlmflow.reports.run_page import Compared, comparisons, run_page
from vlmflow.supervisor.report import Best, TrainingReport


def on_h100(**values: object) -> TrainingReport:
    return msgspec.structs.replace(some_report(), device="NVIDIA H100 80GB HBM3", **values)


def test_the_estimate_is_compared_with_the_smoke_run_and_with_the_full_run() -> None:
    """Speed and memory with both; steps and hours with a training of all steps."""
    guess = estimate(some_inputs(), "h100", None)
    on = guess.on("h100")
    assert on is not None
    smoke = on_h100(target=8, peak_memory=[50_000_000_000])
    full = on_h100(target=guess.steps, steps=guess.steps, seconds=on.fast.seconds * 1.1, peak_memory=[51_000_000_000])
    _, of_smoke, of_full = comparisons(some_gate(), full, smoke, guess)
    assert [row.name for row in of_smoke.rows] == ["memory of one GPU", "speed of all GPUs"]
    rows = {row.name: row for row in of_full.rows}
    assert rows["memory of one GPU"].texts == (f"{guess.memory.total / 1e9:.1f} GB", "51.0 GB")
    assert rows["optimizer steps"].difference == "0.0%"
    assert rows["training and evaluations"].difference == "0.0%", "within the range"
    assert " h to " in rows["training and evaluations"].texts[0]


def test_a_model_without_estimate_has_the_gates_section_alone() -> None:
    assert len(comparisons(some_gate(), on_h100(), on_h100(), NoEstimate("another architecture"))) == 1


def test_the_page_says_when_there_was_nothing_to_choose_from() -> None:
    report = some_report(steps=6, target=6, best=Best(6, 2.0), eval_losses=[(6, 2.0)])
    none = NoEstimate("another architecture")
    page = run_page("mine", [], report, some_gate(), some_report(), none, MADE_OF, Path("none"))
    assert "Model <code>hf://Qwen/Qwen3-8B</code>, data set <code>fire</code>" in page
    assert "<code>train.learning_rate: 0.0002</code>." in page
    assert "Former trainings" not in page
    assert "The best checkpoint is that of step 6: 6 steps, 1 evaluation: nothing to choose from." in page


def test_the_difference_to_a_range_is_that_to_its_nearer_end() -> None:
    assert Compared("speed", 100, 90, up_to=200).difference == "-10.0%"
    assert Compared("speed", 100, 150, up_to=200).difference == "0.0%"
    assert Compared("speed", 100, 220, up_to=200).difference == "+10.0%"
    assert Compared("speed", None, 220, up_to=200).difference == ""


def test_the_page_names_former_trainings_and_where_they_are(tmp_path: Path) -> None:
    leave_training(tmp_path / "full", "1" * 16, [], seed=7)
    none = NoEstimate("another architecture")
    page = run_page("mine", [], some_report(), some_gate(), some_report(), none, MADE_OF, tmp_path / "full")
    section = page.partition("<h2>Former trainings</h2>")[2]
    assert f"<code>{tmp_path}/full</code>" in section
    assert f'<code>{"1" * 16}</code></th><td class="whole">train.seed 7 (now 42)</td>' in section
