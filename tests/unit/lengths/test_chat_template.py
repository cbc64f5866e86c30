"""What becomes of a difference between the training and the model's chat template."""

from pathlib import Path
from typing import Any

import pytest

from vlmflow.core.errors import VlmflowError
from vlmflow.lengths.against_swift import accepted_difference

DIFFERENCE = {"row": "r-1", "day": None, "before": "user\n", "trained": "red", "served": "Hear \x1b[2J"}
QWEN3 = {"template": "qwen3"}


def test_an_equal_template_needs_no_acceptance() -> None:
    assert accepted_difference({}, Path("m"), {}, False) is None


def test_an_accepted_difference_is_told_on_one_line() -> None:
    said = accepted_difference(DIFFERENCE | {"day": "2001-02-03"}, Path("m"), {}, True)
    assert said == (
        r"row r-1: after 'user\n' the training has 'red', the model's chat template 'Hear \x1b[2J' on 2001-02-03 "
        "(it writes the date)"
    )


@pytest.mark.parametrize(
    ("text_args", "trained", "step"),
    [
        (QWEN3, "<think>\n\n</think>\n\nred", "add_non_thinking_prefix: false to runs.NAME.train.swift_args"),
        (QWEN3, "red", "local copy of the model"),
        (QWEN3 | {"add_non_thinking_prefix": False}, "<think>\nWell", "local copy of the model"),
        ({"system": "Be brief."}, "<|im_start|>system", "datasets.NAME.system_prompt"),
    ],
)
def test_a_difference_stops_with_what_makes_the_two_equal(text_args: dict[str, Any], trained: str, step: str) -> None:
    with pytest.raises(VlmflowError, match=r"m: servers would not .* row r-1: after 'user\\n'") as error:
        accepted_difference(DIFFERENCE | {"trained": trained}, Path("m"), text_args, False)
    assert step in error.value.next_step
    assert "models.NAME.template_differs: true" in error.value.next_step


@pytest.mark.parametrize(
    ("failed", "where"), [({"row": "r-1"}, "template fails at row r-1: 'TemplateError"), ({}, "template fails: ")]
)
def test_a_template_that_fails_is_never_accepted(failed: dict[str, str], where: str) -> None:
    with pytest.raises(VlmflowError, match=where):
        accepted_difference(failed | {"failed": "TemplateError: no\x1b"}, Path("m"), {}, True)
