import json
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from vlmflow.core.errors import VlmflowError
from vlmflow.estimate.parameters import weights_of
from vlmflow.estimate.shape import Experts, UnknownModelError, read_shape
from workflow_runs import ROOT

PUBLISHED = ROOT / "tests" / "published"


SIZES = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}


def written(folder: Path, **changes: Any) -> Path:
    """Write the 8B's config.json with other values; None leaves a key out."""
    config = json.loads((PUBLISHED / "Qwen3-VL-8B-Instruct" / "config.json").read_text())
    config = {key: value for key, value in (config | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(("name", "billions"), [("Qwen3-VL-8B-Instruct", 8.767), ("Qwen3-VL-32B-Instruct", 33.357)])
def test_published_models_have_their_published_size(name: str, billions: float) -> None:
    assert weights_of(read_shape(PUBLISHED / name)) / 1e9 == pytest.approx(billions, abs=1e-3)


def test_another_architecture_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnknownModelError, match="model_type is 'qwen2_vl'; the estimate knows qwen3, "):
        read_shape(written(tmp_path, model_type="qwen2_vl"))
    with pytest.raises(UnknownModelError, match="model_type is None"):
        read_shape(written(tmp_path, model_type=None))


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"text_config": None}, "got `null`"),
        ({"text_config": {}}, "missing required field"),
        ({"text_config": {"hidden_size": -1}}, "hidden_size"),
        ({"text_config": "of another file"}, "Expected"),
        ({"vision_config": {"depth": "many"}}, "depth"),
        ({"vision_config": {"depth": 10**12}}, "depth"),
        ({"model_type": "qwen3_moe", **SIZES, "decoder_sparse_step": 0}, "decoder_sparse_step"),
        ({"model_type": "qwen3_moe", **SIZES, "moe_intermediate_size": -768}, "moe_intermediate_size"),
        ({"model_type": "qwen3_moe", **SIZES, "num_experts": -5}, "num_experts"),
        ({"model_type": "qwen3_moe", **SIZES, "num_hidden_layers": 10**6}, "num_hidden_layers"),
        ({"model_type": "qwen3_moe", **SIZES, "moe_intermediate_size": 0}, "moe_intermediate_size"),
        ({"model_type": "qwen3_moe", **SIZES, "num_experts_per_tok": 0}, "num_experts_per_tok"),
        ({"model_type": "qwen3_moe", **SIZES, "num_attention_heads": 65}, "num_attention_heads is more than hidden"),
        ({"text_config": SIZES | {"num_attention_heads": 65, "head_dim": None}}, "num_attention_heads is more than"),
    ],
)
def test_sizes_that_are_none_are_refused_with_their_key(tmp_path: Path, changes: dict[str, Any], fault: str) -> None:
    with pytest.raises(VlmflowError, match=rf"config\.json: .*{fault}"):
        read_shape(written(tmp_path, **changes))


@pytest.mark.parametrize("architecture", ["qwen3_moe", "qwen3_vl_moe"])
def test_experts_that_config_json_leaves_out_are_those_of_transformers(tmp_path: Path, architecture: str) -> None:
    given = {key: SIZES[key] for key in list(SIZES)[:6]}
    of_model = CONFIG_MAPPING[architecture]()
    default = getattr(of_model, "text_config", of_model)

    def experts(**sizes: int) -> Experts | None:
        inner = given | sizes
        config = {"model_type": architecture} | (inner if architecture == "qwen3_moe" else {"text_config": inner})
        return read_shape(written(tmp_path, **config)).text.experts

    width, per_token = default.moe_intermediate_size, default.num_experts_per_tok
    assert experts() == Experts(default.num_experts, per_token, width)
    assert experts(num_local_experts=8) == experts(num_experts=8) == Experts(8, per_token, width)
    assert experts(num_experts=0) is None


@pytest.mark.parametrize("content", ["", "[]", "[" * 100_000, '{"model_type": '])
def test_a_damaged_file_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(VlmflowError, match=r"config\.json: "):
        read_shape(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(VlmflowError, match=r"config\.json: "):
        read_shape(tmp_path)
