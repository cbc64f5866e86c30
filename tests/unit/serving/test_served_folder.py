"""What a server loads: the folder with its picture limits, and vLLM's command line and adapters."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from vlmflow.core.errors import VlmflowError
from vlmflow.pictures.budget import ScaleLimits
from vlmflow.serving.finished_run import link_served
from vlmflow.serving.server import vllm_words

PROCESSOR = {"patch_size": 16, "merge_size": 2, "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216}, "a": 1}


def model(folder: Path, **files: object) -> Path:
    folder.mkdir()
    for name, content in {"config": {}, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / ".snakemake_timestamp").touch()
    return folder


def read(file: Path) -> object:
    return json.loads(file.read_text())


def test_only_the_size_of_pictures_differs_and_all_else_is_linked(tmp_path: Path) -> None:
    base = model(tmp_path / "base", preprocessor_config=PROCESSOR)
    link_served(base, tmp_path / "served", 1024)
    expected = PROCESSOR | {"size": {"shortest_edge": 4096, "longest_edge": 1_048_576}}
    assert read(tmp_path / "served" / "preprocessor_config.json") == expected
    assert read(base / "preprocessor_config.json") == PROCESSOR, "the model's own file stays"
    links = {file.name: file.resolve() for file in (tmp_path / "served").iterdir() if file.is_symlink()}
    assert links == {name: base / name for name in ("config.json", "model.safetensors")}


def test_the_file_that_transformers_reads_is_changed(tmp_path: Path) -> None:
    nested = {"image_processor": PROCESSOR, "processor_class": "P"}
    base = model(tmp_path / "base", preprocessor_config=PROCESSOR, processor_config=nested)
    link_served(base, tmp_path / "served", 1024)
    served = tmp_path / "served"
    assert read(served / "processor_config.json") == nested | {
        "image_processor": PROCESSOR | {"size": {"shortest_edge": 4096, "longest_edge": 1_048_576}}
    }
    assert (served / "preprocessor_config.json").is_symlink()


def test_a_text_model_has_no_limits_and_an_adapter_lies_beside_its_base(tmp_path: Path) -> None:
    base, adapter = model(tmp_path / "base"), tmp_path / "full"
    adapter.mkdir()
    with pytest.raises(VlmflowError, match=r"full/adapter_config\.json: is missing"):
        link_served(base, tmp_path / "served", 1024, adapter)
    for name in ("adapter_config.json", "adapter_model.safetensors", "report.json"):
        (adapter / name).write_text("{}")
    link_served(base, tmp_path / "served", 1024, adapter)
    names = {file.name for file in (tmp_path / "served").iterdir()}
    assert names == {"config.json", "model.safetensors", "adapter_config.json", "adapter_model.safetensors"}


def test_what_is_no_model_and_a_processor_without_limits_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(VlmflowError, match=r"has no config\.json"):
        link_served(tmp_path / "empty", tmp_path / "served", 1024)
    base = model(tmp_path / "base", preprocessor_config={"patch_size": 16, "merge_size": 2})
    with pytest.raises(VlmflowError, match=r"preprocessor_config\.json: has no size, or min_pixels and max_pixels"):
        link_served(base, tmp_path / "served", 1024)


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
