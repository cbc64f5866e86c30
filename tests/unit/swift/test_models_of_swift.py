"""A model as ms-swift sees it: its kind and chat template, the date in it, and the layers that are trained."""

import json
from datetime import date
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from families import LLAMA_3, LLAMA_3_2
from vlmflow.config.model_types import model_types
from vlmflow.core.errors import VlmflowError
from vlmflow.demo.tiny_model import CHAT_TEMPLATE
from vlmflow.fetch.chat_templates import CHATML, PLAIN, date_in
from vlmflow.swift.model_layers import Layers, layers_of, share_without_adapter, what_is_trained
from vlmflow.swift.template_texts import kind_of

ZEPHYR = """\
{% for message in messages %}
{{ '<|' + message.role + '|>\\n' + message.content + eos_token }}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""

LLAMA_2 = """\
{%- if messages[0].role == 'system' -%}{{- raise_exception('no system turn') -}}{%- endif -%}
{%- for message in messages -%}
{{- bos_token + '[INST] ' + message.content + ' [/INST]' if message.role == 'user' else message.content + eos_token -}}
{%- endfor -%}"""


ENDS = {"bos_token": "<s>", "eos_token": "</s>"}


def folder_of(place: Path, architecture: str, template: str | None, **ends: str) -> Path:
    (place / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    (place / "tokenizer_config.json").write_text(json.dumps(ends))
    if template is not None:
        (place / "chat_template.jinja").write_text(template)
    return place


@pytest.mark.parametrize(
    ("architecture", "template", "found"),
    [
        ("Qwen3VLForConditionalGeneration", None, ("qwen3_vl", None)),
        ("Gemma2ForCausalLM", "{{ never.read }}", ("gemma2", None)),
        ("LlamaForCausalLM", LLAMA_3, ("llama", "llama3")),
        ("LlamaForCausalLM", LLAMA_3_2, ("llama", "llama3_2")),
        ("MistralForCausalLM", ZEPHYR, ("zephyr", None)),
        ("LlamaForCausalLM", CHATML, ("yi", "chatml")),
    ],
)
def test_the_model_is_what_its_files_say(
    tmp_path: Path, architecture: str, template: str | None, found: tuple[str, str | None]
) -> None:
    ends = {"bos_token": "<s>" if template in (ZEPHYR, CHATML) else "<|begin_of_text|>", "eos_token": "</s>"}
    assert kind_of(folder_of(tmp_path, architecture, template, **ends), "auto", None) == found


def test_what_is_written_is_not_looked_for(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "LlamaForCausalLM", None)
    assert kind_of(folder, "llama", "llama3") == ("llama", None)
    assert kind_of(folder, "qwen3_vl", None) == ("qwen3_vl", None)
    assert kind_of(folder, "auto", "llama3") == ("llama", None), "the kind that has this template"
    with pytest.raises(VlmflowError, match=r"several kinds .*\n.* write models\.NAME\.model_type: .*llama or "):
        kind_of(folder, "auto", "default")


@pytest.mark.parametrize(
    ("architecture", "template", "why"),
    [
        (
            "Qwen3ForCausalLM",
            CHAT_TEMPLATE,
            r"several of ms-swift's .*: qwen3 / qwen3_nothinking, qwen3 / qwen3_thinking",
        ),
        ("MistralForCausalLM", PLAIN, r"none of ms-swift's .* it has .*, the model's .*### Human:.*mistral / llama"),
        ("LlamaForCausalLM", None, "no single chat template"),
        ("MistralForCausalLM", "{{ raise_exception('no') }}", "the model's chat template fails: 'TemplateError: no'"),
        ("MistralForCausalLM", "{{ 'a' * 10**11 }}", "the model's chat template fails"),
        ("MistralForCausalLM", LLAMA_2, "none of ms-swift's chat templates"),
        ("Qwen3ForSequenceClassification", None, r"config\.json: Qwen3ForSequenceClassification: ms-swift has no kind"),
    ],
)
def test_a_doubt_stops_with_the_candidates(tmp_path: Path, architecture: str, template: str | None, why: str) -> None:
    with pytest.raises(VlmflowError, match=f"(?s){why}"):
        kind_of(folder_of(tmp_path, architecture, template, **ENDS), "auto", None)


def test_no_architecture_gets_the_name_of_another(tmp_path: Path) -> None:
    """Those of all kinds that runs train, in a folder without a chat template."""
    found: dict[str, list[str]] = {}
    for name, kind in model_types().items():
        for architecture in kind.architectures if not kind.refused else []:
            found.setdefault(architecture, []).append(name)
    assert len(found) >= 70
    for architecture, names in found.items():
        folder = folder_of(tmp_path, architecture, None)
        templates = [f"{name} / {template}" for name in names for template in model_types()[name].templates]
        if len(templates) == 1:
            assert kind_of(folder, "auto", None) == (names[0], None)
        else:
            with pytest.raises(VlmflowError) as doubt:
                kind_of(folder, "auto", None)
            assert doubt.value.next_step.endswith(", ".join(templates))


@pytest.mark.parametrize(
    "template",
    ["{{ '2024-07-26' }} after 01 Jan 2023", "26 Jul 2024, 2023-01-01", "00 Abc 2023 2023-99-99 {{ '2024-07-26' }}"],
)
def test_the_first_date_counts_in_whatever_form(template: str) -> None:
    """`chat_templates` puts the date that servers write before a template, which may tell of others."""
    assert date_in(template, alone=False) == date(2024, 7, 26)


def test_a_date_within_a_text_may_mean_another_day() -> None:
    assert date_in("It ends on 2023-10-01. {{ '2024-07-26' }}", alone=True) == date(2024, 7, 26)


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
