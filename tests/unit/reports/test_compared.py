"""A run's page beside what gate and estimate predicted."""

import re
from pathlib import Path

import msgspec

from made_accounts import MADE_OF, leave_training, some_gate, some_report
from made_inputs import some_inputs
from vlmflow.estimate.account import Compared, NoEstimate
from vlmflow.estimate.estimate import estimate
from vlmflow.reports.training_pages import comparisons, difference_of, run_page
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
    rows = comparisons(some_gate(), full, smoke, guess)
    assert list(rows) == ["gate", "smoke", "full"]
    assert [row.name for row in rows["smoke"]] == ["memory of one GPU", "speed of all GPUs"]
    differences = {row.name: difference_of(row) for row in rows["full"]}
    assert differences["optimizer steps"] == "0.0%"
    assert differences["training and evaluations"] == "0.0%", "within the range"
    page = run_page("mine", [], full, some_gate(), smoke, guess, MADE_OF, Path("none"))
    section = page.partition("The estimate against the full run")[2]
    memory = f'">{guess.memory.total / 1e9:.1f} GB</td>\n<td class="n" data-head="measured">51.0 GB</td>'
    assert f'<tr><th>memory of one GPU</th>\n<td class="n" data-head="estimated{memory}' in section
    assert re.search(r">[\d.]+ h to [\d.]+ h</td>", section)


def test_a_model_without_estimate_has_the_gates_section_alone() -> None:
    assert list(comparisons(some_gate(), on_h100(), on_h100(), NoEstimate("another architecture"))) == ["gate"]


def test_the_page_says_when_there_was_nothing_to_choose_from() -> None:
    report = some_report(steps=6, target=6, best=Best(6, 2.0), eval_losses=[(6, 2.0)])
    none = NoEstimate("another architecture")
    page = run_page("mine", [], report, some_gate(), some_report(), none, MADE_OF, Path("none"))
    assert "Model <code>hf://Qwen/Qwen3-8B</code>, data set <code>fire</code>" in page
    assert "<code>train.learning_rate: 0.0002</code>." in page
    assert "Former trainings" not in page
    assert "The best checkpoint is that of step 6: 6 steps, 1 evaluation: nothing to choose from." in page


def test_the_difference_to_a_range_is_that_to_its_nearer_end() -> None:
    measured = {90: "-10.0%", 150: "0.0%", 220: "+10.0%", None: ""}
    assert {value: difference_of(Compared("speed", "tokens/s", 100, value, 200)) for value in measured} == measured
    assert difference_of(Compared("speed", "tokens/s", None, 220, 200)) == ""


def test_the_page_names_former_trainings_and_where_they_are(tmp_path: Path) -> None:
    leave_training(tmp_path / "full", "1" * 16, [], seed=7)
    none = NoEstimate("another architecture")
    page = run_page("mine", [], some_report(), some_gate(), some_report(), none, MADE_OF, tmp_path / "full")
    section = page.partition("<h2>Former trainings</h2>")[2]
    assert f"<code>{tmp_path}/full</code>" in section
    assert f'<code>{"1" * 16}</code></th><td class="whole">train.seed 7 (now 42)</td>' in section
