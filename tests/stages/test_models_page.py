"""docs/models.md says what was tried, and of which code; no family of models stands in the code."""

import ast

import pytest

from models_page import roads, rows
from vlmflow.config.model_settings import TESTED
from vlmflow.config.model_types import model_types
from workflow_runs import ROOT

BY_THE_DEMO = {"qwen3_vl"}
"""The kind that `make demo` and most tests train."""

FAST_FORM = "scripts/vlmflow/lengths/chat_form.py"
"""The fast way to count the tokens of Qwen, used only where ms-swift's template gives the same."""


@pytest.mark.parametrize("name", roads())
def test_the_page_is_of_the_code_of_today(name: str) -> None:
    road = roads()[name]
    assert name in rows(), f"docs/models.md lacks {name}: its test has not passed with the plugin models_page"
    model_type, template, ways, _, _, code = rows()[name]
    assert (model_type, template, ways) == road[:3]
    assert code == road.code, f"the code of {name} has changed: run its test again with the plugin models_page"


def test_what_is_called_tested_was_tried() -> None:
    assert set(TESTED) == {road.model_type for road in roads().values()} | BY_THE_DEMO


def test_no_kind_of_model_stands_in_the_code() -> None:
    """A new family costs no code: what differs between models, libraries and tables say."""
    found = []
    for file in sorted((ROOT / "scripts").rglob("*.py")):
        place = str(file.relative_to(ROOT))
        texts = (node.value for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Constant))
        found += [(place, text) for text in texts if isinstance(text, str) and text in model_types()]
    allowed = {FAST_FORM, "scripts/vlmflow/config/model_settings.py"}
    assert [each for each in found if each[0] not in allowed] == []
