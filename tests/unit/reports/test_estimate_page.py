"""The estimate page, as a browser shows it."""

from pathlib import Path
from typing import Any

import pytest

from browser import Browser
from made_inputs import settings_of, some_inputs
from vlmflow.estimate.account import NoEstimate
from vlmflow.estimate.estimate import estimate
from vlmflow.reports.planning_pages import estimate_page

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
