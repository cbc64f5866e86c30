"""Which quantised models are refused, and what the next step is."""

import json
from pathlib import Path
from typing import Any

import pytest

from vlmflow.core.errors import VlmflowError
from vlmflow.fetch.model_files import block_of, refuse_quantised, without_quantisation

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def config(folder: Path, quantisation: Any, part: str | None = None) -> Path:
    """Write a config.json, and return it. part: the part that says how the model is quantised."""
    said = {"quantization_config": quantisation}
    file = folder / "config.json"
    file.write_text(json.dumps({"a": 1, **({part: said | {"b": 2}} if part else said)}))
    return file


def refusal(file: Path, source: str = "", *, dequantize: bool = False) -> str:
    with pytest.raises(VlmflowError) as error:
        refuse_quantised(file, source, dequantize=dequantize)
    return str(error.value)


def test_fp8_needs_the_key_and_the_unquantised_model_is_named(tmp_path: Path) -> None:
    said = refusal(config(tmp_path, FP8), "hf://Qwen/Qwen3-8B-FP8@" + "0" * 40)
    assert "config.json: the base is quantised (fp8)" in said
    assert "set models.NAME.dequantize: true" in said
    assert "or use hf://Qwen/Qwen3-8B, the model that was quantised" in said
    assert "or use the unquantised model as" in refusal(config(tmp_path, FP8), "/models/mine-FP8")


@pytest.mark.parametrize("part", [None, "text_config"])
def test_with_the_key_it_is_taken(tmp_path: Path, part: str | None) -> None:
    file = config(tmp_path, FP8, part)
    refuse_quantised(file, dequantize=True)
    assert block_of(file) == (128, 128)
    assert without_quantisation(file) == ({"a": 1, part: {"b": 2}} if part else {"a": 1})
    assert block_of(config(tmp_path, {"quant_method": "fp8"})) == (128, 128), "transformers' default"
    assert block_of(config(tmp_path, {"quant_method": "fp8", "weight_block_size": None})) is None


@pytest.mark.parametrize(
    ("method", "source", "unquantised"),
    [
        ("compressed-tensors", "/models/mine", None),
        ("gptq", "hf://Qwen/Qwen3-8B-GPTQ-Int4", "Qwen/Qwen3-8B"),
        ("awq", "hf://Qwen/Qwen3-8B-AWQ", "Qwen/Qwen3-8B"),
        ("bitsandbytes", "hf://unsloth/Qwen3-8B-unsloth-bnb-4bit", "Qwen/Qwen3-8B"),
        ("mxfp4", "hf://openai/gpt-oss-20b", None),
        ("fbgemm_fp8", "/models/Llama-3.2-1B-Instruct-FP8", "meta-llama/Llama-3.2-1B-Instruct"),
        ("mxfp8", "", None),
    ],
)
def test_other_forms_stay_refused(tmp_path: Path, method: str, source: str, unquantised: str | None) -> None:
    for dequantize in (False, True):
        said = refusal(config(tmp_path, {"quant_method": method}), source, dequantize=dequantize)
        assert f"the base is quantised ({method})" in said
        assert "dequantize: true" not in said
        assert (f"use hf://{unquantised}, the model" if unquantised else "use the unquantised model as") in said
    assert "only FP8 (fp8) can become bfloat16" in said


@pytest.mark.parametrize(
    ("quantisation", "said"),
    [
        (None, r"the base is not quantised, and models\.NAME\.dequantize is for bases in FP8"),
        ({}, "the base is not quantised"),
        *(
            (FP8 | {"weight_block_size": block}, "weight_block_size = .* is not two numbers above 0")
            for block in ([128], [0, 128], [128, -1], [1.5, 2], [True, 2], "128", 128, {"a": 1})
        ),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path: Path, quantisation: Any, said: str) -> None:
    with pytest.raises(VlmflowError, match=said):
        refuse_quantised(config(tmp_path, quantisation), dequantize=True)


def test_two_descriptions_must_be_the_same(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    both = {"quantization_config": FP8, "text_config": {"quantization_config": FP8 | {"weight_block_size": None}}}
    file.write_text(json.dumps(both))
    assert "quantization_config and text_config.quantization_config differ" in refusal(file, dequantize=True)
