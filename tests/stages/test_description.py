"""What a model says of itself by its small files."""

from pathlib import Path

import msgspec
import pytest
from transformers import AutoModelForCausalLM

from families import write_family
from seeing_families import write_qwen2_5_vl
from tiny_models import tensors_of
from vlmflow.swift.meta_model import compare_tensors
from vlmflow.swift.model_layers import Description, Layout


def described(folder: Path) -> Description:
    return msgspec.convert(compare_tensors(folder, tensors_of(folder))["model"], Description)


def test_experts_of_files_and_of_memory(tmp_path: Path) -> None:
    folder = write_family("qwen3-moe", tmp_path / "m")
    found = described(folder)
    weights = sum(weight.numel() for weight in AutoModelForCausalLM.from_pretrained(folder).parameters())
    assert (found.architecture, found.experts, found.parts) == ("Qwen3MoeForCausalLM", 4, {"language_model": weights})
    assert found.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    experts = "model.layers.*.mlp.experts"
    joined = ["MergeModulelist", "Concatenate"]
    assert Layout(f"{experts}.*.gate_proj.weight", f"{experts}.gate_up_proj", 8, joined) in found.layouts
    assert Layout(*["model.layers.*.self_attn.q_proj.weight"] * 2, 2) in found.layouts
    assert {"input_ids", "labels"} <= set(found.inputs)


def test_parts_of_a_model_that_sees(tmp_path: Path) -> None:
    folder = write_qwen2_5_vl(tmp_path / "m")
    found = described(folder)
    assert set(found.parts) == {"language_model", "vision_tower", "aligner"}
    assert sum(found.parts.values()) == sum(tensor.numel() for tensor in tensors_of(folder).values())
    assert Layout("visual.blocks.*.attn.qkv.weight", "model.visual.blocks.*.attn.qkv.weight", 2) in found.layouts
    assert "pixel_values" in found.inputs


def test_a_model_that_transformers_cannot_build_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no-such-type"}')
    assert set(compare_tensors(tmp_path, ["w"])) == {"failed"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma2", "phi3", "mixtral"])
def test_all_weights_are_counted(name: str, tmp_path: Path) -> None:
    folder = write_family(name, tmp_path / "m")
    assert sum(described(folder).parts.values()) == sum(tensor.numel() for tensor in tensors_of(folder).values())
