"""What a model says of itself by its small files, and the tensors that its configuration needs."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from safetensors import safe_open
from transformers import (
    AutoModelForCausalLM,
    PretrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
)
from transformers.models.auto import modeling_auto

from families import write_family
from seeing_families import write_qwen2_5_vl
from tiny_models import tensors_of
from vlmflow.swift import child_process
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


TEXT = {
    "vocab_size": 96,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 16,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
CONFIGS = [
    Qwen3Config(**TEXT),
    Qwen3MoeConfig(**TEXT | EXPERTS),
    Qwen3VLConfig(text_config=TEXT, vision_config=VISION),
    Qwen3VLMoeConfig(text_config=TEXT | EXPERTS, vision_config=VISION),
]
WHOLE = {"missing": [], "unneeded": []}


def compared(folder: Path, names: Iterable[str]) -> dict[str, Any]:
    """Compare, without what the model says of itself."""
    return {key: value for key, value in compare_tensors(folder, names).items() if key != "model"}


Saved = Callable[[PretrainedConfig], tuple[Path, list[str]]]


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    """Save a model; gives its folder and the names of its tensors there."""

    def save(config: PretrainedConfig) -> tuple[Path, list[str]]:
        mappings = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
        kind = next(mapping[type(config)] for mapping in mappings if type(config) in mapping)
        kind(config).save_pretrained(tmp_path)
        with safe_open(tmp_path / "model.safetensors", "pt") as file:
            return tmp_path, list(file.keys())

    return save


def with_config(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_what_transformers_saves_is_whole(config: PretrainedConfig, saved: Saved) -> None:
    folder, names = saved(config)
    assert compared(folder, names) == WHOLE
    old = [*names, "model.layers.0.self_attn.rotary_emb.inv_freq"]
    assert compared(folder, old) == WHOLE, "computed since then"
    one = next((name for name in names if ".experts.1." in name), "lm_head.weight")
    less = [name for name in names if name != one]
    assert compared(folder, [*less, "x.y"]) == {"missing": [one], "unneeded": ["x.y"]}


def test_a_head_that_is_the_embedding_may_be_in_the_files_or_not(saved: Saved) -> None:
    """The configuration decides: untied, the head would be random numbers."""
    folder, names = saved(Qwen3Config(**TEXT | {"tie_word_embeddings": True}))
    assert "lm_head.weight" not in names
    assert compared(folder, names) == compared(folder, [*names, "lm_head.weight"]) == WHOLE
    with_config(folder, tie_word_embeddings=False)
    assert compared(folder, names) == {"missing": ["lm_head.weight"], "unneeded": []}


def test_what_is_not_known_is_not_compared(saved: Saved) -> None:
    folder, _ = saved(CONFIGS[0])
    with_config(folder, quantization_config={"quant_method": "fp8"})
    assert compared(folder, []) == {}, "the merge refuses it"
    (folder / "config.json").write_text('{"model_type": "clip"}')
    assert compared(folder, []) == {}


def test_a_configuration_of_no_model_is_a_failure(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = saved(CONFIGS[0])
    with_config(folder, num_hidden_layers=10**9, layer_types=None)
    with monkeypatch.context() as patch:
        patch.setattr(child_process, "SECONDS", 1.0)
        assert "failed" in compared(folder, [])
    (folder / "config.json").write_text('{"model_type": "of nobody"}')
    assert compared(folder, [])["failed"].startswith("ValueError: ")
