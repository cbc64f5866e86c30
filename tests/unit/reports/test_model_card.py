"""The model card of merged weights: what they were trained on, and how to ask them."""

import copy
from typing import Any

import msgspec
import pytest

from made_stats import some_stats
from vlmflow.reports.provenance import model_card
from vlmflow.rows.stats import SplitCounts

LENGTHS = {"tokens": 1000, "picture_tokens": 0, "median": 10, "longest": [{"tokens": 20}]}
FACTS: dict[str, Any] = {
    "run": "text",
    "data": msgspec.to_builtins(
        some_stats(
            dataset="alpaca",
            kind="alpaca",
            modality="text",
            train=SplitCounts(15, 9, {"duplicate": 1, "not_sampled": 5}),
        )
    ),
    "rights": {"dataset": "alpaca", "sources": [], "licence": "unknown", "pictures": [], "questions": []},
    "base_model": {"source": "hf://Qwen/Qwen3-8B", "revision": "abc"},
    "smoke": {"fitted": {"train": {"lengths": {"rows": 9}, "left_out": 0, "shortened": 0}}, "lengths": LENGTHS},
    "training": {
        "best": {"step": 1, "eval_loss": 0.5},
        "steps": 1,
        "target": 1,
        "ended_early": False,
        "world_size": 1,
        "device": "cpu",
        "strategy": "ddp",
        "tokens": 1,
        "seconds": 1,
    },
    "verification": {"tensors": None, "logits": None},
    "sees_pictures": False,
}


@pytest.mark.parametrize(
    ("changes", "said", "unsaid"),
    [
        (
            {},
            [
                "(rows of kind alpaca)",
                "import AutoModelForCausalLM, AutoTokenizer",
                "have 1,000 tokens;",
                "| train | 15 | 9 | 1 | 5 |",
            ],
            ["ImageTextToText", "PICTURE", "trajectory", "for pictures"],
        ),
        ({"sees_pictures": True}, ["AutoModelForImageTextToText", "AutoProcessor"], ["PICTURE", "CausalLM"]),
        (
            {"sees_pictures": True, "data": {"kind": "fire", "modality": "image"}},
            ["(trajectory form)", "AutoModelForImageTextToText", '"path": "PICTURE"'],
            ["CausalLM"],
        ),
    ],
)
def test_the_card_is_of_this_model_and_these_rows(changes: dict[str, Any], said: list[str], unsaid: list[str]) -> None:
    facts = copy.deepcopy(FACTS)
    facts["data"] |= changes.get("data", {})
    facts |= {key: value for key, value in changes.items() if key != "data"}
    card = model_card(facts)
    assert [text for text in said if text not in card] == []
    assert [text for text in unsaid if text in card] == []


LOGITS = {
    "verdict": "agree",
    "rows": 4,
    "positions": 200,
    "dtype": "bfloat16",
    "device": "cpu",
    "deviation": 0.02,
    "allowed_deviation": 0.04,
    "effect": 0.03,
    "effect_found": 0.71,
    "effect_rounded": 0.715,
    "top1_agreement": 0.99,
}


def test_the_card_says_if_the_logits_are_inconclusive() -> None:
    facts = FACTS | {"verification": {"tensors": None, "logits": LOGITS}}
    assert "inconclusive" not in model_card(facts)
    card = model_card(facts | {"verification": {"tensors": None, "logits": LOGITS | {"verdict": "inconclusive"}}})
    assert "This comparison is **inconclusive**" in card
    assert "shows only 0.71 times the adapter's effect; these weights show\n  0.71." in card
