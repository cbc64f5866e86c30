"""Models with experts: the proof by logits, and matrices that transformers transposes as it loads them."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    MixtralConfig,
    PreTrainedConfig,
    Qwen3MoeConfig,
)

from families import made_tokenizer
from seeing_families import write_qwen3_vl_moe
from tiny_models import file_names, randomise, tensors_of
from vlmflow.config.strategies import FULL
from vlmflow.core.errors import VlmflowError
from vlmflow.merging.merge import merge_weights, planned_merge
from vlmflow.merging.proof import LogitProof
from vlmflow.merging.verify_logits import verify_logits, verify_stored_logits
from vlmflow.merging.verify_tensors import verify_tensors

WITH_EXPERTS: dict[str, type[PreTrainedConfig]] = {"mixtral": MixtralConfig, "qwen3_moe": Qwen3MoeConfig}

TOKENS = [{"input_ids": torch.randint(5, 250, (1, 400), generator=torch.Generator().manual_seed(0))}]
"""The inputs of one row."""


def write_run(folder: Path, kind: str, seed: int, **lora: list[str]) -> Path:
    """A base with eight experts, an adapter of its attention and of what `lora` says, and their merge, in bfloat16."""
    torch.manual_seed(seed)
    tokenizer = made_tokenizer(("<s>", "<unk>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"))
    config = WITH_EXPERTS[kind](
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_local_experts=8,
        num_experts_per_tok=2,
        tie_word_embeddings=False,
    )
    base = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    randomise(base, 0.2)
    base.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    layers = ["q_proj", "k_proj", "v_proj", "o_proj"]
    adapter = LoraConfig(r=4, lora_alpha=8, target_modules=layers, **lora)
    model = get_peft_model(base, adapter, autocast_adapter_dtype=False)
    randomise(model, 0.1)
    model.save_pretrained(folder / "adapter")
    merge_weights(folder / "base", folder / "adapter", folder / "merged", file_names(folder / "base"), 2)
    return folder


def verify(folder: Path, merged: Path) -> LogitProof:
    return verify_logits(folder / "base", folder / "adapter", merged, TOKENS, "cpu", "bfloat16")


@pytest.mark.parametrize("kind", WITH_EXPERTS)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 50))])
def test_no_right_merge_is_refused_and_every_wrong_one_is(kind: str, seed: int, tmp_path: Path) -> None:
    is_told_from_wrong_ones(write_run(tmp_path, kind, seed))


@pytest.mark.parametrize("kind", WITH_EXPERTS)
def test_the_same_holds_of_adapted_experts(kind: str, tmp_path: Path) -> None:
    is_told_from_wrong_ones(
        write_run(tmp_path, kind, 0, target_parameters=["experts.gate_up_proj", "experts.down_proj"])
    )


def is_told_from_wrong_ones(folder: Path) -> None:
    proof = verify(folder, folder / "merged")
    assert proof.verdict == "agree"
    assert proof.deviation < 0.01 < 0.02 < proof.effect
    assert proof.unrounded is not None
    assert proof.unrounded > proof.deviation
    for fault in ("lost", "doubled"):
        wrong = shutil.copytree(folder / "merged", folder / fault)
        file = wrong / "model.safetensors"
        base, merged = load_file(folder / "base" / "model.safetensors"), load_file(file)
        changed = base if fault == "lost" else {name: 2 * merged[name] - base[name] for name in base}
        save_file(changed, file, {"format": "pt"})
        with pytest.raises(VlmflowError, match="compared with peft's merge with rounded weights"):
            verify(folder, wrong)


EXPERTS = "model.language_model.layers.0.mlp.experts."
FEW_TOKENS = torch.arange(20, 80)[None]


@pytest.fixture(params=[40, 24], ids=["other shapes", "square in memory"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A base in the hub's layout and its fine-tune, as transformers saves it. Its width is 48."""
    write_qwen3_vl_moe(tmp_path / "base", inner=request.param)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "base")
    randomise(model, 0.05)
    model.eval().save_pretrained(tmp_path / "full")
    (tmp_path / "full" / "trained.json").write_text(json.dumps({"tensors": sorted(tensors_of(tmp_path / "full"))}))
    with torch.inference_mode():
        answers = model(input_ids=FEW_TOKENS, logits_to_keep=16).logits[0].clone()
    save_file({"row.0.input_ids": FEW_TOKENS, "row.0.logits": answers}, tmp_path / "full" / "logits.safetensors")
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
