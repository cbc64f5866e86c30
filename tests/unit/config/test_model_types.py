"""What is known of a model by its address alone."""

import copy
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from vlmflow.config.model import Config, check_config
from vlmflow.config.model_settings import ModelSettings
from vlmflow.config.model_types import kinds_of, model_types, published_type
from vlmflow.core.errors import VlmflowError

CONFIG: dict[str, Any] = {
    "models": {},
    "datasets": {"d": {"kind": "fire", "train": "a.json"}},
    "runs": {"r": {"model": "m", "dataset": "d"}},
}


def checked(**models: dict[str, str]) -> Config:
    return check_config(copy.deepcopy(CONFIG) | {"models": models}, [])


@pytest.mark.parametrize(
    ("address", "kind"),
    [
        ("hf://Qwen/Qwen3-8B", "qwen3"),
        (f"hf://Qwen/Qwen3-VL-32B-Instruct@{'a' * 40}", "qwen3_vl"),
        ("hf://meta-llama/Llama-3.2-1B-Instruct", "llama"),
    ],
)
def test_the_kind_of_a_published_model_is_known_by_its_address(address: str, kind: str) -> None:
    written = {"source": address, "model_type": kind}
    for given in ({"source": address}, written, written | {"model_type": "auto"}):
        assert checked(m=given) == checked(m=written), "what follows from the address counts as if it were written"


def test_the_chat_template_of_a_published_model_counts_as_if_it_were_written() -> None:
    config = checked(m={"source": "hf://meta-llama/Llama-3.2-1B-Instruct"})
    assert config.runs["r"].train.swift_args == {"template": "llama3_2"}
    config = checked(m={"source": "hf://meta-llama/Llama-3.2-1B-Instruct", "template": "llama3"})
    assert config.runs["r"].train.text_args == {"template": "llama3"}
    both = copy.deepcopy(CONFIG) | {"models": {"m": {"source": "hf://Qwen/Qwen3-8B", "template": "qwen3"}}}
    both["runs"]["r"]["train"] = {"swift_args": {"template": "qwen3_nothinking"}}
    assert check_config(both, []).runs["r"].train.swift_args == {"template": "qwen3_nothinking"}, "the run's own wins"
    assert checked(m={"source": "/a/folder", "model_type": "qwen3_vl"}).runs["r"].train.swift_args == {}


def test_a_chat_template_has_a_name_of_ms_swift() -> None:
    with pytest.raises(VlmflowError, match=r"models\.m\.template: .*no chat template 'qwen2_5vl'; nearest: qwen2_5_vl"):
        checked(m={"source": "/a/folder", "model_type": "qwen2_5_vl", "template": "qwen2_5vl"})


def test_weights_of_another_run_are_of_the_kind_of_its_model() -> None:
    config = checked(m={"source": "hf://Qwen/Qwen3-8B"}, again={"source": "merged/r"})
    assert config.models["again"].model_type == "qwen3"


@pytest.mark.parametrize("source", ["hf://me/mine", "/a/folder"])
def test_what_an_address_does_not_say_is_left_to_the_models_files(source: str) -> None:
    config = checked(m={"source": source}, again={"source": "merged/r"})
    assert [model.model_type for model in config.models.values()] == ["auto", "auto"]
    assert [model.untested for model in config.models.values()] == [None, None]
    assert config.runs["r"].train.swift_args == {}
    written = checked(m={"source": source, "template": "qwen3"})
    assert written.runs["r"].train.swift_args == {"template": "qwen3"}


def test_a_base_model_is_trained_with_the_template_that_it_gets() -> None:
    config = checked(m={"source": "/a/folder", "model_type": "polylm", "chat_template": "chatml"})
    assert config.runs["r"].train.swift_args == {"template": "chatml"}
    assert checked(m={"source": "/a", "chat_template": "plain"}).runs["r"].train.swift_args == {"template": "default"}
    with pytest.raises(
        VlmflowError, match=r"models\.m\.chat_template: plain is for text, and a qwen3_vl sees pictures"
    ):
        checked(m={"source": "/a", "model_type": "qwen3_vl", "chat_template": "plain"})


def test_nearly_every_published_model_has_one_kind() -> None:
    kinds = [
        (repo, name) for name, kind in model_types().items() for repos in kind.published.values() for repo in repos
    ]
    assert len(dict(kinds)) > 1_000
    assert len(kinds) - len(dict(kinds)) <= 1, "ms-swift lists glm-edge-4b-chat twice"
    assert published_type("openai/whisper") is None


@pytest.mark.parametrize(
    ("kind", "name", "part"),
    [
        ("qwen3_vl", "model.visual.blocks.0.attn.qkv", "vision_tower"),
        ("qwen3_vl", "model.visual.deepstack_merger_list.0.linear_fc1", "aligner"),
        ("qwen3_vl", "model.visualiser", "language_model"),
        ("gemma3_vision", "model.multi_modal_projector", "aligner"),
        ("gemma3_vision", "model.vision_tower.encoder.layers.0", "vision_tower"),
        ("qwen3", "model.visual.blocks.0", "language_model"),
    ],
)
def test_a_layer_belongs_to_the_part_that_ms_swift_says(kind: str, name: str, part: str) -> None:
    assert model_types()[kind].part_of(name) == part


def test_a_config_json_without_an_architecture_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": {"a": 1}}')
    assert kinds_of(tmp_path) == []


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("qwen3_emb", "does not write answers"),
        ("qwen2_5_prm", "does not write answers"),
        ("bge_reranker", "does not write answers"),
        ("deepseek_vl2", "is no decoder of transformers, so that it would run Python from its folder"),
    ],
)
def test_a_kind_that_no_run_trains_is_refused_by_name(kind: str, why: str) -> None:
    with pytest.raises(VlmflowError, match=f"models.m.model_type: {kind} {why}; choose another model"):
        checked(m={"source": "hf://me/mine", "model_type": kind})
    of_hub = next(iter(model_types()[kind].published.values()))[0]
    with pytest.raises(VlmflowError, match=f"models.m.model_type: auto: hf://{of_hub} is a {kind}, which {why}"):
        checked(m={"source": f"hf://{of_hub}"})


def test_runs_train_the_kinds_that_transformers_runs() -> None:
    trained = [kind for kind in model_types().values() if kind.refused is None]
    assert len(trained) > 90
    assert sum(bool(kind.parts) for kind in trained) > 40


@pytest.mark.parametrize("value", [0, 20240726, 1.5, "26 Jul 2024", "2024-13-01", "0001-01-01", [2024], "\x1b[31m"])
def test_only_a_date_is_a_date(value: object) -> None:
    """Pydantic alone takes 0 for 1970-01-01."""
    with pytest.raises(ValidationError, match="is not a date; write it as 2024-07-26"):
        ModelSettings.model_validate({"source": "/m", "date": value})


@pytest.mark.parametrize("value", ["2024-07-26", date(2024, 7, 26), None])
def test_a_date_is_read_from_yaml_and_from_texts(value: object) -> None:
    assert ModelSettings.model_validate({"source": "/m", "date": value}).date == (date(2024, 7, 26) if value else None)
