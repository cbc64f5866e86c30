"""Experts whose matrices transformers transposes as it loads them, if their shape says so: Qwen3-VL-MoE on the hub."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from seeing_families import write_qwen3_vl_moe
from tiny_models import file_names, randomise, tensors_of
from vlmflow.config.strategies import FULL
from vlmflow.core.errors import VlmflowError
from vlmflow.merging.merge import merge_weights, planned_merge
from vlmflow.merging.verify_logits import verify_stored_logits
from vlmflow.merging.verify_tensors import verify_tensors

EXPERTS = "model.language_model.layers.0.mlp.experts."
TOKENS = torch.arange(20, 80)[None]


@pytest.fixture(params=[40, 24], ids=["other shapes", "square in memory"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A base in the hub's layout and its fine-tune, as transformers saves it. Its width is 48."""
    write_qwen3_vl_moe(tmp_path / "base", inner=request.param)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "base")
    randomise(model, 0.05)
    model.eval().save_pretrained(tmp_path / "full")
    (tmp_path / "full" / "trained.json").write_text(json.dumps({"tensors": sorted(tensors_of(tmp_path / "full"))}))
    with torch.inference_mode():
        answers = model(input_ids=TOKENS, logits_to_keep=16).logits[0].clone()
    save_file({"row.0.input_ids": TOKENS, "row.0.logits": answers}, tmp_path / "full" / "logits.safetensors")
    return tmp_path


def test_a_fine_tune_gets_the_layout_of_its_base(run: Path) -> None:
    base, full, files = run / "base", run / "full", file_names(run / "base")
    merge_weights(base, full, run / "merged", files, 2)
    before, trained, merged = (tensors_of(folder) for folder in (base, full, run / "merged"))
    assert {name: tensor.shape for name, tensor in merged.items()} == {name: one.shape for name, one in before.items()}
    down = f"{EXPERTS}down_proj"
    assert torch.equal(merged[down], trained[down].mT)
    assert verify_tensors(base, full, run / "merged", files, 2, FULL).touched == len(merged)
    assert verify_stored_logits(base, full, run / "merged", "cpu", "float32").deviation < 1e-5
    assert planned_merge(base, full, files).rounding_leaves == pytest.approx(1, abs=1e-3)


def test_matrices_in_the_wrong_order_are_found(run: Path) -> None:
    """As if the merge had copied the bytes."""
    base, full, files = run / "base", run / "full", file_names(run / "base")
    merge_weights(base, full, run / "merged", files, 2)
    down = f"{EXPERTS}down_proj"
    (file,) = [file for file in (run / "merged").glob("*.safetensors") if down in load_file(file)]
    tensors = load_file(file)
    save_file(tensors | {down: tensors_of(full)[down].reshape(tensors[down].shape)}, file, {"format": "pt"})
    with pytest.raises(VlmflowError, match="ulps away"):
        verify_tensors(base, full, run / "merged", files, 2, FULL)


def test_another_shape_is_refused(run: Path) -> None:
    """Only experts are transposed."""
    file = run / "full" / "model.safetensors"
    name = "model.language_model.layers.0.self_attn.k_proj.weight"
    tensors = load_file(file)
    save_file(tensors | {name: tensors[name].T.contiguous()}, file, {"format": "pt"})
    with pytest.raises(VlmflowError, match=f"tensor {name} has shape "):
        merge_weights(run / "base", run / "full", run / "merged", file_names(run / "base"), 2)
