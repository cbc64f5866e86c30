"""The proof by tensors: it passes what was merged, and catches each way of merging wrongly."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tiny_models import (
    VARIANTS,
    WIDE,
    file_names,
    tensors_of,
    write_adapter,
    write_base,
    write_gpt2,
    write_wide_adapter,
    write_wide_base,
)
from vlmflow.core.errors import VlmflowError
from vlmflow.merging import verify_tensors as module
from vlmflow.merging.merge import merge_weights
from vlmflow.merging.verify_tensors import TensorProof, verify_tensors

TOUCHED = "model.layers.1.mlp.down_proj.weight"
UNTOUCHED = "model.layers.1.input_layernorm.weight"

Tensors = dict[str, torch.Tensor]


def merge_and_verify(base: Path, adapter: Path, merged: Path) -> TensorProof:
    merge_weights(base, adapter, merged, file_names(base), 2)
    return verify_tensors(base, adapter, merged, file_names(base), 2)


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[torch.dtype, Path]:
    folder = tmp_path_factory.mktemp("bases")
    types = (torch.float32, torch.bfloat16, torch.float16)
    return {dtype: write_base(folder / str(dtype), dtype, attention_bias=True) for dtype in types}


@pytest.mark.parametrize(
    ("variant", "dtype"),
    [
        *((variant, torch.bfloat16) for variant in VARIANTS),
        *(
            pytest.param(variant, dtype, marks=[] if variant == "all linear layers" else [pytest.mark.slow])
            for variant in VARIANTS
            for dtype in (torch.float32, torch.float16)
        ),
    ],
)
def test_merged_weights_pass(bases: dict[torch.dtype, Path], tmp_path: Path, variant: str, dtype: torch.dtype) -> None:
    """Every variant, in every type, within the stated tolerance."""
    base = bases[dtype]
    adapter = write_adapter(base, tmp_path / "adapter", **VARIANTS[variant])
    proof = merge_and_verify(base, adapter, tmp_path / "merged")
    assert proof.tensors == proof.touched + proof.untouched == 33
    assert proof.touched > 0
    assert proof.changed_share > 0.5
    assert proof.largest_deviation <= 0.5
    assert dtype == torch.float32 or proof.largest_deviation > 0.4


def test_transposed_layers_pass(tmp_path: Path) -> None:
    base = write_gpt2(tmp_path / "base")
    adapter = write_adapter(base, tmp_path / "adapter", target_modules=["c_attn", "c_proj"], fan_in_fan_out=True)
    assert merge_and_verify(base, adapter, tmp_path / "merged").touched == 6
    square = "transformer.h.0.attn.c_proj.weight"
    update = tensors_of(tmp_path / "merged")[square] - tensors_of(base)[square]
    with pytest.raises(VlmflowError, match=f"tensor {square}, row "):
        verify_changed(tmp_path, tmp_path / "untransposed", square, lambda tensor: tensor - update + update.T)


def test_a_tied_head_that_differs_from_its_embedding(tmp_path: Path) -> None:
    """As if a merge had changed it alone: the base has one tensor for both."""
    base = write_gpt2(tmp_path / "base")
    adapter = write_adapter(base, tmp_path / "adapter", target_modules=["c_proj"], fan_in_fan_out=True)
    merge_weights(base, adapter, tmp_path / "merged", file_names(base), 2)
    file = tmp_path / "merged" / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"lm_head.weight": tensors["transformer.wte.weight"] + 1}, file, {"format": "pt"})
    with pytest.raises(VlmflowError, match=r"model\.safetensors: too long"):
        verify_tensors(base, adapter, tmp_path / "merged", file_names(base), 2)


@pytest.fixture(scope="module")
def merge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base in bfloat16, an adapter and their merge."""
    folder = tmp_path_factory.mktemp("merge")
    base = write_base(folder / "base", torch.bfloat16)
    adapter = write_adapter(base, folder / "adapter")
    merge_weights(base, adapter, folder / "merged", file_names(base), 2)
    return folder


def verify_changed(merge: Path, tmp_path: Path, tensor: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Verify a copy of the merged folder in which one tensor is changed; its layout stays as it is."""
    merged = shutil.copytree(merge / "merged", tmp_path / "merged")
    path = next(path for path in merged.glob("*.safetensors") if tensor in load_file(path))
    tensors = load_file(path)
    tensors[tensor] = change(tensors[tensor])
    save_file(tensors, path, {"format": "pt"})
    verify_tensors(merge / "base", merge / "adapter", merged, file_names(merge / "base"), 2)


def original(merge: Path, tensor: str) -> torch.Tensor:
    path = next(path for path in (merge / "base").glob("*.safetensors") if tensor in load_file(path))
    return load_file(path)[tensor]


def flipped_bit(tensor: torch.Tensor) -> torch.Tensor:
    changed = tensor.clone()
    changed.view(torch.uint8)[-1] ^= 1
    return changed


def with_step(tensor: torch.Tensor) -> torch.Tensor:
    """The last number moved to its neighbour."""
    changed = tensor.clone()
    changed.view(torch.int16)[-1, -1] += 1
    return changed


def with_nan(tensor: torch.Tensor) -> torch.Tensor:
    changed = tensor.clone()
    changed[3, 2] = torch.nan
    return changed


def test_unchanged_copy_passes(merge: Path, tmp_path: Path) -> None:
    verify_changed(merge, tmp_path, TOUCHED, lambda tensor: tensor)


def test_one_flipped_bit_in_an_untouched_tensor(merge: Path, tmp_path: Path) -> None:
    """What the adapter does not touch stays as it was."""
    with pytest.raises(VlmflowError, match=rf"\.safetensors: tensor {UNTOUCHED} differs from the base's"):
        verify_changed(merge, tmp_path, UNTOUCHED, flipped_bit)


def test_one_number_one_step_off(merge: Path, tmp_path: Path) -> None:
    """A touched tensor's last number, rounded to the wrong neighbour."""
    with pytest.raises(VlmflowError, match=rf"tensor {TOUCHED}, row 47, column 79: is \S+; .* ulps away"):
        verify_changed(merge, tmp_path, TOUCHED, with_step)


def test_tensor_that_was_not_merged(merge: Path, tmp_path: Path) -> None:
    """Merged nothing."""
    with pytest.raises(VlmflowError, match=rf"tensor {TOUCHED}, row \d+, .*, as in the base: not merged"):
        verify_changed(merge, tmp_path, TOUCHED, lambda _: original(merge, TOUCHED))


def test_scale_that_is_off(merge: Path, tmp_path: Path) -> None:
    """The update came in twice."""
    base = original(merge, TOUCHED).float()
    with pytest.raises(VlmflowError, match=f"tensor {TOUCHED}, row"):
        verify_changed(merge, tmp_path, TOUCHED, lambda tensor: (2 * tensor.float() - base).bfloat16())


def test_nan_is_no_agreement(merge: Path, tmp_path: Path) -> None:
    with pytest.raises(VlmflowError, match=rf"tensor {TOUCHED}, row 3, column 2: is nan"):
        verify_changed(merge, tmp_path, TOUCHED, with_nan)


def test_another_adapter(merge: Path, tmp_path: Path) -> None:
    """The settings that give the scale are read by peft, not by the merge."""
    adapter = shutil.copytree(merge / "adapter", tmp_path / "adapter")
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"use_rslora": True}))
    with pytest.raises(VlmflowError, match="ulps away"):
        verify_tensors(merge / "base", adapter, merge / "merged", file_names(merge / "base"), 2)


def test_tensor_of_the_adapter_without_a_place(merge: Path, tmp_path: Path) -> None:
    """Every adapter key is used here as well."""
    adapter = shutil.copytree(merge / "adapter", tmp_path / "adapter")
    path = adapter / "adapter_model.safetensors"
    extra: dict[str, Any] = {"base_model.model.elsewhere.lora_A.weight": torch.ones(1)}
    save_file(load_file(path) | extra, path)
    with pytest.raises(
        VlmflowError, match=r"base_model\.model\.elsewhere\.lora_A\.weight matches no tensor of the base"
    ):
        verify_tensors(merge / "base", adapter, merge / "merged", file_names(merge / "base"), 2)


def test_truncated_shard(merge: Path, tmp_path: Path) -> None:
    """Found before a tensor is read."""
    merged = shutil.copytree(merge / "merged", tmp_path / "merged")
    path = max(merged.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(VlmflowError, match=f"{path.name}: truncated"):
        verify_tensors(merge / "base", merge / "adapter", merged, file_names(merge / "base"), 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@settings(max_examples=200)
@given(value=st.floats(-60000, 60000, width=32) | st.floats(-(2.0**-120), 2.0**-120, width=32))
def test_rounding_is_within_half_an_ulp(dtype: torch.dtype, value: float) -> None:
    exact = torch.tensor([value], dtype=torch.float64)
    rounded = exact.to(dtype).double()
    ulp = module._ulp(exact, dtype)
    assert (rounded - exact).abs() <= ulp / 2
    assert (exact + 2 * ulp).to(dtype) != exact.to(dtype)


def test_reads_views_of_the_file_and_no_copies(merge: Path) -> None:
    """What safetensors hands out is the mapped file, so that memory does not grow with the model."""
    path = max((merge / "merged").glob("*.safetensors"))
    with safe_open(path, framework="pt") as file:
        names = list(file.keys())
        places = [file.get_tensor(name).data_ptr() for name in names]
        again = [file.get_tensor(name).data_ptr() for name in names]
    assert places == again


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_tensors_of_many_blocks(tmp_path: Path, dtype: torch.dtype) -> None:
    """A wrong number in the last row of a tensor that is cut into tasks and blocks: each kind of wrong number."""
    base, adapter = write_wide_base(tmp_path / "base", 1, 1, dtype), write_wide_adapter(tmp_path / "adapter", 1)
    proof = merge_and_verify(base, adapter, tmp_path / "merged")
    assert dtype == torch.float32 or 0.49 < proof.largest_deviation <= 0.5
    path = next((tmp_path / "merged").glob("*.safetensors"))
    last = load_file(path)["model.layers.0.mlp.up_proj.weight"][-1, -1]
    integer = torch.int32 if dtype == torch.float32 else torch.int16
    other_numbers = [
        -last,
        (last.view(integer) + (1 << 10 if dtype == torch.float32 else 1)).view(dtype),
        torch.tensor(0, dtype=dtype),
        torch.tensor(torch.inf, dtype=dtype),
        torch.tensor(torch.nan, dtype=dtype),
    ]
    for number in other_numbers:
        with path.open("r+b") as file:
            file.seek(-dtype.itemsize, 2)
            file.write(number.view(integer).numpy().tobytes())
        with pytest.raises(VlmflowError, match=rf"up_proj\.weight, row {WIDE[0] - 1}, column {WIDE[1] - 1}: is"):
            verify_tensors(base, adapter, tmp_path / "merged", file_names(base), 2)


NUMBERS = st.floats(-60000, 60000, width=32) | st.floats(-(2.0**-120), 2.0**-120, width=32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@settings(max_examples=500)
@given(value=NUMBERS, away=st.floats(-(2.0**-20), 2.0**-20), steps=st.integers(-2, 2), ulps=st.floats(0.01, 0.5))
def test_no_number_that_is_further_is_left_out(
    dtype: torch.dtype, value: float, away: float, steps: int, ulps: float
) -> None:
    """Near the boundaries of rounding, next to powers of two, and in the other sign."""
    found = (torch.tensor([[value]]).to(dtype).view(torch.int16) + steps).view(dtype)
    ulp = module._ulp(found.double(), dtype)
    for exact in (found.double() + ulp * (ulps + away), found.double() - ulp * (ulps + away), -found.double()):
        rows, _ = module._further_than(ulps, dtype, exact.float(), found.float(), is_sum=True)
        left_out = isinstance(rows, torch.Tensor) and not len(rows)
        assert not left_out or (found.double() - exact).abs() <= ulps * module._ulp(exact, dtype)


def test_a_sum_that_is_rounded_to_infinity_is_looked_at() -> None:
    """It is finite, and nearer to the type's infinity than half an ulp."""
    value = torch.tensor([[torch.finfo(torch.bfloat16).max + 1.01 * 2.0**119]], dtype=torch.float64)
    found = value.bfloat16().float()
    assert found.isinf()
    assert module._further_than(0.5, torch.bfloat16, value.float(), found, is_sum=True) == module.ALL


def test_most_numbers_are_left_out() -> None:
    """Else the proof is slow."""
    exact = torch.randn(64, 1024, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = exact.bfloat16().float()
    rows, _ = module._further_than(0.49, torch.bfloat16, exact.float(), found, is_sum=True)
    assert 0 < len(rows) < 0.03 * exact.numel()
