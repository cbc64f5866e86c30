"""The estimate page, as a browser shows it, and a run's page beside what gate and estimate predicted."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from browser import Browser
from made_accounts import MADE_OF, leave_training, some_gate, some_report
from made_inputs import settings_of, some_inputs
from vlmflow.estimate.account import Compared, NoEstimate
from vlmflow.estimate.estimate import estimate
from vlmflow.reports.planning_pages import estimate_page
from vlmflow.reports.training_pages import comparisons, difference_of, run_page
from vlmflow.supervisor.report import Best, TrainingReport

HOSTILE = "<script>document.title='taken'</script>"


def page_of(run: str = "mine", train: dict[str, Any] | None = None, **others: Any) -> str:
    settings = settings_of(train, **others)
    found = estimate(some_inputs(train, **others), settings.gpu, settings.gpu_hour_price)
    return estimate_page(run, found, settings)


def test_it_shows_what_a_run_needs_on_its_gpu(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(page_of(HOSTILE, {"per_device_batch_size": 4}, gpu="rtx-4090", gpu_hour_price=0.5))
    with Browser(tmp_path / "profile") as browser:
        browser.check_page(file, f"{HOSTILE}: what it needs")
        text = browser.evaluate("document.body.innerText")
        products = browser.evaluate("document.querySelectorAll('#products tbody tr').length")
        chosen = browser.evaluate("document.querySelector('.badge.own').closest('tr').innerText")
    assert "It does not fit GeForce RTX 4090" in text
    assert "The run stops before it asks for a GPU." in text
    assert "tuner: qlora" in text
    assert products == 13
    assert "1 × GeForce RTX 4090" in chosen
    assert "does not fit" in chosen


@pytest.mark.parametrize(
    ("others", "said"),
    [
        ({"gpu": "h100"}, "It fits H100 SXM 80 GB: "),
        ({"gpu": "rtx-4090"}, "It may not fit GeForce RTX 4090: "),
        ({"gpu": "rtx-4090", "estimate": "ignore"}, "It starts in any case (estimate: ignore)."),
        ({}, "The run names no GPU product (gpu)"),
        ({"device": "cpu"}, "It trains on the CPU"),
    ],
)
def test_its_first_sentence_is_the_verdict(others: dict[str, Any], said: str) -> None:
    assert said in page_of(**others)


def test_it_says_when_there_is_nothing_to_choose_from() -> None:
    once = page_of(train={"max_steps": 6, "evaluation_steps": 100})
    assert "6 steps, 1 evaluation: nothing to choose from" in once
    assert "44 steps, 11 evaluations" in page_of(train={"max_steps": 44})


def test_a_price_is_shown_only_where_it_is_known() -> None:
    assert '<span class="soft small">price</span>' in page_of(gpu="h100", gpu_hour_price=3)
    assert '<span class="soft small">price</span>' not in page_of(gpu="h100")


def test_several_nodes_are_named_with_their_network() -> None:
    page = page_of(nodes=2, processes=8, strategy="zero3", network_gbit=400)
    assert "strategy zero3 and 16 processes (2 nodes × 8 processes), at 400 Gbit/s between nodes." in page
    assert "2 × 8 × H100 SXM 80 GB" in page
    assert "Gbit/s" not in page_of(processes=8, strategy="zero3")


def test_offload_shows_the_main_memory_that_it_needs() -> None:
    assert "Main memory for offload" not in page_of()


def test_a_model_of_another_architecture_has_no_figures(tmp_path: Path) -> None:
    page = estimate_page("mine", NoEstimate("config.json: model_type is 'x'"), settings_of())
    assert "model_type is &#39;x&#39;" in page
    assert "GPU products" not in page


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
