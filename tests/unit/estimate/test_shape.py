"""The sizes of a model, as transformers builds it from its config.json."""

import json
from pathlib import Path
from typing import Any

import pytest

from made_inputs import TEXT, text_shape
from vlmflow.core.errors import VlmflowError
from vlmflow.estimate.shape import UnknownModelError, read_shape, weights_of
from workflow_runs import ROOT

PUBLISHED = ROOT / "tests" / "published"

QWEN2_5 = {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16}
LLAMA = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
TIED = {"tie_word_embeddings": True}


def written(folder: Path, **changes: Any) -> Path:
    """Write the 8B's config.json with other values; None leaves a key out."""
    config = json.loads((PUBLISHED / "Qwen3-VL-8B-Instruct" / "config.json").read_text())
    config = {key: value for key, value in (config | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("name", "weights"), [("Qwen3-VL-8B-Instruct", 8_767_123_696), ("Qwen3-VL-32B-Instruct", 33_357_390_064)]
)
def test_published_models_have_their_published_size(name: str, weights: int) -> None:
    assert weights_of(read_shape(PUBLISHED / name)) == weights


@pytest.mark.parametrize(
    ("model_type", "sizes", "weights"),
    [
        ("qwen2", QWEN2_5 | TIED | {"vocab_size": 151_936, "num_key_value_heads": 2}, 3_085_938_688),
        ("llama", LLAMA | TIED | {"vocab_size": 128_256, "num_key_value_heads": 8, "head_dim": 64}, 1_235_814_400),
        ("gpt2", {"n_layer": 6, "n_embd": 768, "n_head": 12, "vocab_size": 50_257}, 81_912_576),
    ],
)
def test_published_models_of_other_families_too(
    model_type: str, sizes: dict[str, Any], weights: int, tmp_path: Path
) -> None:
    """Qwen2.5-3B, Llama-3.2-1B, distilgpt2: with tied embeddings, and keys of config.json that have other names."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type} | sizes))
    assert weights_of(read_shape(tmp_path)) == weights


def test_another_architecture_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnknownModelError, match="transformers knows no model_type 'qwen9'"):
        read_shape(written(tmp_path, model_type="qwen9"))
    with pytest.raises(UnknownModelError, match="no model_type 'None'"):
        read_shape(written(tmp_path, model_type=None))
    with pytest.raises(UnknownModelError, match="no decoder of model_type 'vit'"):
        read_shape(written(tmp_path, model_type="vit", text_config=None, vision_config=None))
    with pytest.raises(UnknownModelError, match="it is quantised"):
        read_shape(written(tmp_path, quantization_config={"quant_method": "fp8"}))


@pytest.mark.parametrize(
    "changes",
    [
        {"text_config": TEXT | {"hidden_size": -1}},
        {"text_config": TEXT | {"hidden_size": "wide"}},
        {"text_config": TEXT | {"hidden_size": 1 << 62}},
        {"text_config": "of another file"},
        {"text_config": TEXT | {"sliding_window": "4"}},
        {"vision_config": {"depth": "many"}},
        {"text_config": TEXT | {"num_attention_heads": 0, "head_dim": None}},
    ],
)
def test_sizes_that_are_none_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    """The model is built in a child with limits of memory and time."""
    with pytest.raises(VlmflowError, match=r"config\.json: a model of the sizes in config\.json fails: "):
        read_shape(written(tmp_path, **changes))


@pytest.mark.slow
def test_building_a_model_of_very_many_layers_ends(tmp_path: Path) -> None:
    with pytest.raises(VlmflowError, match=r"fails: (not done after|more than) "):
        read_shape(written(tmp_path, text_config=TEXT | {"num_hidden_layers": 10**6}))


def test_a_token_goes_through_few_of_the_experts() -> None:
    shape = text_shape("qwen3_moe", num_experts=8, num_experts_per_tok=2, moe_intermediate_size=96)
    (down,) = (one for one in shape.of.matrices if one.name.endswith("experts.down_proj"))
    assert (down.experts, down.active, down.count) == (8, 2, TEXT["num_hidden_layers"])
    assert down.weights == 8 * 96 * TEXT["hidden_size"]


@pytest.mark.parametrize("content", ["", "[]", "[" * 100_000, '{"model_type": ', " " * (1 << 21)])
def test_a_damaged_file_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(VlmflowError, match=r"config\.json: "):
        read_shape(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(VlmflowError, match=r"config\.json: "):
        read_shape(tmp_path)
