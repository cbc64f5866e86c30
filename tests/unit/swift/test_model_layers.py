"""Which layers of a model are trained, and how the log and the gate say so."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from vlmflow.config.model_types import model_types
from vlmflow.swift.model_layers import Layers, layers_of, share_without_adapter, what_is_trained

TEXT = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "tie_word_embeddings": False,
}
VISION = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 32}


def seeing() -> torch.nn.Module:
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 2, 2]}}
    vision = VISION | {"deepstack_visual_indexes": [0]}
    return Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=TEXT | rope, vision_config=vision))


def test_every_number_of_the_model_is_counted_once() -> None:
    model = seeing()
    layers = layers_of(model)
    assert sum(each.parameters for each in layers) == sum(weight.numel() for weight in model.parameters())
    assert sum(each.bytes for each in layers) == sum(weight.nbytes for weight in model.parameters())
    assert all(each.trained == each.parameters for each in layers)
    kind = model_types()["qwen3_vl"]
    parts = {each.name: kind.part_of(each.name) for each in layers}
    assert set(parts.values()) == {"vision_tower", "aligner", "language_model"}
    of_aligner = {name for name, part in parts.items() if part == "aligner"}
    assert {name.split(".")[2] for name in of_aligner} == {"merger", "deepstack_merger_list"}
    (up,) = (each for each in layers if each.name == "model.language_model.layers.*.mlp.up_proj")
    assert (up.kind, up.count, up.parameters) == ("Linear", 2, 2 * 32 * 64)


def test_an_adapter_belongs_to_the_layer_that_it_changes() -> None:
    lora = LoraConfig(r=4, target_modules=r"model\.language_model.*\.(q_proj|up_proj)", modules_to_save=["lm_head"])
    model = get_peft_model(seeing(), lora)
    trained = {each.name: each for each in layers_of(model) if each.trained}
    layers = "model.language_model.layers.*"
    assert set(trained) == {f"{layers}.self_attn.q_proj", f"{layers}.mlp.up_proj", "lm_head"}
    assert trained[f"{layers}.mlp.up_proj"].trained == 2 * 4 * (32 + 64)
    assert trained[f"{layers}.mlp.up_proj"].parameters == 2 * 32 * 64
    assert trained[f"{layers}.mlp.up_proj"].kind == "Linear"


def test_the_log_says_which_experts_get_no_adapter() -> None:
    """all-linear means q, k, v and o in a mixture of experts: its experts are no linear layers."""
    config = Qwen3MoeConfig(**TEXT, moe_intermediate_size=64, num_experts=4, num_experts_per_tok=2)
    model = get_peft_model(Qwen3MoeForCausalLM(config), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    layers = layers_of(model)
    (experts,) = (each for each in layers if each.name.endswith("experts"))
    assert (experts.trained, experts.parameters) == (0, 2 * 4 * 3 * 32 * 64)
    said = what_is_trained(layers)
    assert "in q_proj, v_proj; not trained: " in said
    share = experts.parameters / sum(each.parameters for each in layers)
    assert f"model.layers.*.mlp.experts ({share:.0%} of the model)" in said


def test_attention_alone_leaves_97_percent_without_adapter() -> None:
    """Of Qwen3-30B-A3B, as docs/training.md says."""
    heads = {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_hidden_layers": 48}
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=151_936, hidden_size=2048, **heads, **experts))
        adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]))
    assert f"{share_without_adapter(layers_of(adapted)):.0%}" == "97%"


def test_adapters_of_experts_count_as_trained() -> None:
    config = Qwen3MoeConfig(**TEXT, moe_intermediate_size=64, num_experts=4, num_experts_per_tok=2)
    plain = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    more = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], target_parameters=["gate_up_proj", "down_proj"])
    without, with_experts = (layers_of(get_peft_model(Qwen3MoeForCausalLM(config), lora)) for lora in (plain, more))
    (experts,) = (each for each in with_experts if each.name.endswith("experts"))
    assert (experts.kind, experts.parameters) == ("Qwen3MoeExperts", 2 * 4 * 3 * 32 * 64)
    assert experts.trained == 2 * 4 * 4 * ((32 + 128) + (64 + 32))
    total = sum(each.parameters for each in without)
    assert total == sum(each.parameters for each in with_experts)
    shares = [share_without_adapter(layers) for layers in (without, with_experts)]
    assert shares[0] - shares[1] == pytest.approx(experts.parameters / total)


def test_small_layers_are_not_listed() -> None:
    small, large = Layers("norm", "RMSNorm", 1, 4, 8, 0), Layers("experts", "Experts", 2, 996, 1992, 0)
    assert what_is_trained([small, large]) == (
        "0 numbers are trained, the model has 1,000; in no layer; not trained: experts (100% of the model)"
    )
