"""The kind of a model and its chat template, found by its own files."""

import json
from pathlib import Path

import pytest

from families import LLAMA_3, LLAMA_3_2
from vlmflow.config.model_types import model_types
from vlmflow.core.errors import VlmflowError
from vlmflow.demo.tiny_model import CHAT_TEMPLATE
from vlmflow.fetch.chat_templates import CHATML, PLAIN
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
