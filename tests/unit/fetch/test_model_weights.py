"""Finding a model's weights, and refusing folders whose weights cannot be told or merged."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tiny_models import file_names, write_base
from vlmflow.core.errors import VlmflowError
from vlmflow.fetch.model_files import INDEX
from vlmflow.fetch.model_weights import ModelWeights, read_model_weights


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_base(tmp_path / "base")


def read(folder: Path) -> ModelWeights:
    return read_model_weights(folder, file_names(folder))


def set_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_sorts_a_folder(base: Path) -> None:
    for name in ("pytorch_model.bin", "consolidated.safetensors", "original/consolidated.00.pth", "merges.txt"):
        (base / name).parent.mkdir(exist_ok=True)
        (base / name).write_bytes(b"x")
    weights = read(base)
    assert len(weights.shards) > 3
    assert set(weights.tensors()) == set(json.loads((base / INDEX).read_text())["weight_map"])
    assert weights.left_out == ["consolidated.safetensors", "original/consolidated.00.pth", "pytorch_model.bin"]
    assert {INDEX, "config.json", "tokenizer.json", "chat_template.jinja", "merges.txt"} <= set(weights.others)


def test_one_file_needs_no_index(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    assert list(read(tmp_path).tensors()) == ["a"]


@pytest.mark.parametrize("place", ["top", "text_config"])
def test_quantised_base_is_refused(base: Path, place: str) -> None:
    quantisation = {"quantization_config": {"quant_method": "gptq"}}
    set_config(base, **(quantisation if place == "top" else {"text_config": quantisation}))
    with pytest.raises(VlmflowError, match=r"config\.json: the base is quantised \(gptq\)"):
        read(base)


def test_base_without_safetensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(VlmflowError, match=r"no weights in safetensors form, but pytorch_model\.bin"):
        read(tmp_path)


def test_doubled_tensor_is_refused(base: Path) -> None:
    first, second = sorted(base.glob("*.safetensors"))[:2]
    name, tensor = next(iter(load_file(first).items()))
    save_file({**load_file(second), name: tensor}, second)
    with pytest.raises(VlmflowError, match=f"{second.name}: tensor {name} is also in {first.name}"):
        read(base)


def test_missing_and_truncated_shards_are_refused(base: Path) -> None:
    """A base that a full disk cut short."""
    shard = sorted(base.glob("*.safetensors"))[1]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    with pytest.raises(VlmflowError, match=f"{shard.name}: truncated"):
        read(base)
    shard.unlink()
    with pytest.raises(VlmflowError, match=f'= "{shard.name}", which is missing'):
        read(base)


def test_index_must_agree_with_the_shards(base: Path) -> None:
    index = json.loads((base / INDEX).read_text())
    shard = index["weight_map"].pop("model.norm.weight")
    (base / INDEX).write_text(json.dumps(index))
    with pytest.raises(VlmflowError, match=rf"model\.norm\.weight is not listed, but is in {shard}"):
        read(base)
    index["weight_map"]["model.norm.weight"] = shard
    index["weight_map"]["model.other.weight"] = shard
    (base / INDEX).write_text(json.dumps(index))
    with pytest.raises(VlmflowError, match=rf"model\.other\.weight is listed for {shard}"):
        read(base)


@pytest.mark.parametrize("index", ["[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": ["b"]}}', "no JSON"])
def test_broken_index_is_refused(base: Path, index: str) -> None:
    (base / INDEX).write_text(index)
    with pytest.raises(VlmflowError, match=INDEX):
        read(base)


def test_index_may_not_lead_out_of_the_folder(base: Path) -> None:
    save_file({"a": torch.zeros(2)}, base.parent / "other.safetensors")
    (base / INDEX).write_text('{"weight_map": {"a": "../other.safetensors"}}')
    with pytest.raises(VlmflowError, match="must be in the model's own folder"):
        read(base)


def test_two_forms_of_weights_are_refused(base: Path) -> None:
    save_file({"a": torch.zeros(2)}, base / "model.safetensors")
    with pytest.raises(VlmflowError, match=r"has both model\.safetensors and model\.safetensors\.index\.json"):
        read(base)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"text_config": [1]}, "text_config = \\[1\\] is not a JSON object"),
        ({"text_config": "x"}, "text_config = 'x' is not a JSON object"),
        ({"quantization_config": "x"}, "the base is quantised \\(x\\)"),
    ],
)
def test_a_configuration_of_another_form_is_refused(base: Path, values: dict[str, Any], said: str) -> None:
    set_config(base, **values)
    with pytest.raises(VlmflowError, match=rf"config\.json: {said}"):
        read(base)
