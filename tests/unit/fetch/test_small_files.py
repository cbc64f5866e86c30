"""A model's files without weights."""

import json
from pathlib import Path

import pytest

from stages.fetch_model import main as fetch_model
from stages.fetch_model_files import main as fetch_model_files
from vlmflow.core.errors import VlmflowError
from vlmflow.fetch.chat_templates import require_chat_template
from vlmflow.fetch.placed import read_small_files


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


def test_a_model_can_be_estimated_before_its_weights_are_there(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text("{}")
    fetch_model_files(files=tmp_path / "files", source=str(source), store=tmp_path / "store")
    assert [file.name for file in read_small_files(tmp_path / "files").iterdir()] == ["config.json"]
    with pytest.raises(VlmflowError, match="has no safetensors weights"):
        fetch_model(model=tmp_path / "model", source=str(source), store=tmp_path / "store")
