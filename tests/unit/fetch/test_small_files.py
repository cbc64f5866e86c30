"""A model's files without weights."""

import json
from pathlib import Path

import pytest

from fetch_model import main as fetch_model
from fetch_model_files import main as fetch_model_files
from vlmflow.core.errors import VlmflowError
from vlmflow.fetch.small_files import read_small_files, refuse_other_architecture, require_chat_template


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("chat_template.jinja", "{{ messages }}"),
        ("chat_template.json", "{}"),
        ("tokenizer_config.json", '{"chat_template": "{{ messages }}"}'),
        ("processor_config.json", '{"chat_template": "{{ messages }}"}'),
    ],
)
def test_a_model_without_a_chat_template_is_refused_before_it_is_trained(
    tmp_path: Path, name: str, content: str
) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    with pytest.raises(VlmflowError, match="the model has no chat template"):
        require_chat_template(tmp_path)
    (tmp_path / name).write_text(content)
    require_chat_template(tmp_path)


@pytest.mark.parametrize(
    ("config", "model_type", "cause", "next_step"),
    [
        (
            {"architectures": ["Qwen3VLForConditionalGeneration"]},
            "qwen2_5_vl",
            "the model is a Qwen3VLForConditionalGeneration; model_type qwen2_5_vl is for Qwen2_5_VLForConditionalGen",
            "set models.NAME.model_type: qwen3_vl",
        ),
        (
            {"architectures": ["Made\x1b[2J"]},
            "qwen3",
            r"the model is a Made\x1b[2J; model_type qwen3",
            "ms-swift knows",
        ),
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


def test_a_model_can_be_estimated_before_its_weights_are_there(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text("{}")
    fetch_model_files(files=tmp_path / "files", source=str(source), store=tmp_path / "store")
    assert [file.name for file in read_small_files(tmp_path / "files").iterdir()] == ["config.json"]
    with pytest.raises(VlmflowError, match="has no safetensors weights"):
        fetch_model(model=tmp_path / "model", source=str(source), store=tmp_path / "store")
