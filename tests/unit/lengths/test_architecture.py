"""A model of another kind than its model_type says."""

import json
from pathlib import Path

import pytest

from vlmflow.core.errors import VlmflowError
from vlmflow.lengths.against_swift import refuse_other_architecture


@pytest.mark.parametrize(
    ("config", "model_type", "cause", "next_step"),
    [
        (
            {"architectures": ["Qwen3VLForConditionalGeneration"]},
            "qwen2_5_vl",
            "the model is a Qwen3VLForConditionalGeneration; model_type qwen2_5_vl is for",
            "set models.NAME.model_type: qwen3_vl",
        ),
        ({"architectures": ["Made\x1b[2J"]}, "qwen3", "the model is a Made\\x1b[2J; model_type", "ms-swift knows"),
    ],
)
def test_a_model_of_another_architecture_than_its_model_type_is_refused(
    tmp_path: Path, config: dict[str, list[str]], model_type: str, cause: str, next_step: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(VlmflowError) as found:
        refuse_other_architecture(tmp_path, model_type)
    assert cause in found.value.cause
    assert next_step in found.value.next_step


@pytest.mark.parametrize(
    ("config", "model_type"),
    [
        ({"architectures": ["Qwen3VLForConditionalGeneration"]}, "qwen3_vl"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "deepseek_vl2"),  # ms-swift does not say which it is for
        ({}, "qwen3"),
        ({"architectures": "Qwen3ForCausalLM"}, "qwen3_vl"),
    ],
)
def test_a_model_of_the_same_or_of_an_unknown_architecture_is_taken(
    tmp_path: Path, config: dict[str, object], model_type: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    refuse_other_architecture(tmp_path, model_type)
