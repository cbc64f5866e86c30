"""vLLM's command line, and the adapters that it would not serve whole."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from vlmflow.core.errors import VlmflowError
from vlmflow.pictures.budget import ScaleLimits
from vlmflow.serving.server import vllm_words

LIMITS = ScaleLimits(4096, 1_048_576)
LANGUAGE = "base_model.model.model.language_model.layers.0.self_attn.q_proj.lora_A.weight"
TOWER = "base_model.model.model.visual.blocks.0.attn.qkv.lora_A.weight"


def adapter(folder: Path, key: str = LANGUAGE, **config: object) -> Path:
    folder.mkdir()
    settings = {"peft_type": "LORA", "r": 16, "lora_alpha": 32.0, "target_modules": ["q_proj"], **config}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    save_file({key: np.zeros((2, 2), np.float32)}, folder / "adapter_model.safetensors")
    return folder


def base(folder: Path) -> Path:
    (folder / "config.json").write_text('{"architectures": ["Qwen3VLForConditionalGeneration"]}')
    return folder


def after(words: list[str], option: str) -> str:
    return words[words.index(option) + 1]


def test_the_command_has_the_gpus_the_length_and_the_limits() -> None:
    words = vllm_words(Path("/w/merged/mine"), "mine", 2, 8192, True, LIMITS, 8000)
    assert words[:3] == ["vllm", "serve", "/w/merged/mine"]
    options = ("--host", "--port", "--tensor-parallel-size", "--max-model-len", "--served-model-name")
    assert [after(words, option) for option in options] == ["127.0.0.1", "8000", "2", "8192", "mine"]
    assert json.loads(after(words, "--limit-mm-per-prompt")) == {"image": 16, "video": 0}, "of a row"
    assert after(words, "--tool-call-parser") == "hermes"
    assert "--enable-auto-tool-choice" in words
    size = {"shortest_edge": 4096, "longest_edge": 1_048_576}
    assert json.loads(after(words, "--mm-processor-kwargs")) == {"size": size}
    assert after(words, "--allowed-origins") == "[]"
    assert after(words, "--allowed-media-domains").endswith(".invalid"), "an empty list would allow all of them"
    assert not {"--enable-lora", "--trust-remote-code", "--allowed-local-media-path", "--api-key"} & set(words)


@pytest.mark.parametrize(
    ("limits", "keys"),
    [
        (ScaleLimits(max_patches=3), {"max_patches": 3}),
        (ScaleLimits(longest_edge=868), {"size": {"longest_edge": 868}}),
    ],
)
def test_the_limits_are_in_the_words_of_the_processor(limits: ScaleLimits, keys: dict[str, object]) -> None:
    words = vllm_words(Path("/m"), "mine", 1, 2048, True, limits, 8000)
    assert json.loads(after(words, "--mm-processor-kwargs")) == keys


def test_a_text_model_gets_no_options_for_pictures() -> None:
    assert not [word for word in vllm_words(Path("/m"), "mine", 1, 2048, False, None, 8000) if "mm" in word]


def test_a_model_whose_pictures_have_no_limit_fetches_none_either() -> None:
    words = vllm_words(Path("/m"), "mine", 1, 2048, True, None, 8000)
    assert after(words, "--allowed-media-domains").endswith(".invalid")
    assert "--mm-processor-kwargs" not in words


@pytest.mark.parametrize(
    ("ranks", "limit"), [({"r": 16}, "16"), ({"r": 17}, "32"), ({"rank_pattern": {"q": 65}}, "128")]
)
def test_base_and_adapter_are_two_models(tmp_path: Path, ranks: dict[str, object], limit: str) -> None:
    words = vllm_words(base(tmp_path), "mine", 1, 2048, True, LIMITS, 8000, adapter(tmp_path / "full", **ranks))
    assert after(words, "--served-model-name") == "base"
    assert after(words, "--lora-modules") == f"mine={tmp_path}/full"
    assert after(words, "--max-lora-rank") == limit
    assert "--enable-lora" in words


@pytest.mark.parametrize(
    ("key", "config", "why"),
    [
        (TOWER, {}, "changes 1 tensors of the vision tower, such as base_model.model.model.visual"),
        (LANGUAGE, {"use_dora": True}, "DoRA"),
        (LANGUAGE, {"modules_to_save": ["lm_head"]}, r"layers that an adapter replaces \(lm_head\)"),
        (LANGUAGE, {"bias": "all"}, "biases"),
        (LANGUAGE, {"r": 513}, "rank 513 is above"),
    ],
)
def test_an_adapter_that_vllm_would_not_serve_whole_is_refused(
    tmp_path: Path, key: str, config: dict[str, object], why: str
) -> None:
    with pytest.raises(VlmflowError, match=why):
        vllm_words(base(tmp_path), "mine", 1, 2048, True, LIMITS, 8000, adapter(tmp_path / "full", key, **config))
