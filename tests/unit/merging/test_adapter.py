"""What an adapter does to each tensor, which are refused by name, and what the smoke stage says of the merge."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tiny_models import file_names, write_adapter, write_base
from vlmflow.core.errors import VlmflowError
from vlmflow.fetch.model_weights import read_model_weights
from vlmflow.merging.merge import load_factors, load_finite, planned_merge
from vlmflow.merging.plan import Update, plan_updates
from vlmflow.merging.trained import read_trained
from vlmflow.supervisor.report import PlannedMerge

Tensors = dict[str, torch.Tensor]

LAYER = "model.layers.0.self_attn.q_proj"
KEY = f"base_model.model.{LAYER}"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("models") / "base", attention_bias=True)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("models") / "tied", tie_word_embeddings=True)


@pytest.fixture(scope="module")
def written(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(base, tmp_path_factory.mktemp("adapters") / "written")


@pytest.fixture
def adapter(written: Path, tmp_path: Path) -> Path:
    """An adapter that a test may change."""
    return shutil.copytree(written, tmp_path / "adapter")


def plan(base: Path, adapter: Path) -> dict[str, Update]:
    weights = read_model_weights(base, file_names(base))
    return plan_updates(weights, read_trained(adapter), {})


def change_tensors(adapter: Path, change: Callable[[Tensors], Any]) -> None:
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def change_config(adapter: Path, **values: Any) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_every_tensor_has_its_place(base: Path, tmp_path: Path) -> None:
    """Every adapter key is used, once."""
    adapter = write_adapter(base, tmp_path, modules_to_save=["lm_head"], bias="all", use_dora=True)
    updates = plan(base, adapter)
    used = [key for u in updates.values() for key in (u.replacement, u.magnitude, *(u.factors or ())) if key]
    assert sorted(used) == sorted(load_file(adapter / "adapter_model.safetensors"))
    assert updates["lm_head.weight"] == Update(replacement="base_model.model.lm_head.weight")


def test_scale_and_shapes(base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(base, tmp_path, r=4, lora_alpha=8, target_modules=["q_proj", "embed_tokens"])
    updates = plan(base, adapter)
    assert updates[f"{LAYER}.weight"].scale == 2.0
    left, right = load_factors(partial(load_finite, read_trained(adapter)), updates["model.embed_tokens.weight"])
    assert (left.shape, right.shape) == ((96, 4), (4, 48))


@pytest.mark.parametrize(
    ("lora", "layer", "other"),
    [
        ({"target_modules": ["embed_tokens"]}, r"model\.embed_tokens", "the output head"),
        ({"target_modules": ["lm_head"]}, "lm_head", "the token embeddings"),
        ({"modules_to_save": ["embed_tokens"]}, r"model\.embed_tokens", "the output head"),
        ({"modules_to_save": ["lm_head"]}, "lm_head", "the token embeddings"),
    ],
)
def test_tied_weights_are_refused(tied: Path, tmp_path: Path, lora: dict[str, Any], layer: str, other: str) -> None:
    """One tensor that serves as embedding and as head cannot become two."""
    adapter = write_adapter(tied, tmp_path, **lora)
    with pytest.raises(VlmflowError, match=f"the adapter changes {layer}, which the base ties to {other}"):
        plan(tied, adapter)


def test_other_layers_of_a_tied_model_are_merged(tied: Path, tmp_path: Path) -> None:
    assert f"{LAYER}.weight" in plan(tied, write_adapter(tied, tmp_path))


REFUSED: dict[str, list[Any]] = {
    "peft_type": ["IA3", "PROMPT_TUNING"],
    "init_lora_weights": ["pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga"],
    "task_type": ["CHAT"],
    "bias": ["some"],
    "r": [0, 10**400, "8"],
    "lora_alpha": [float("nan"), "64"],
    "rank_pattern": [
        *({"q_proj(": 2}, {"(a+)+b": 4}, {"q{99999999999999}": 4}, {"(" * 3_000 + ")" * 3_000: 4}, {"q_proj": 0}, None),
    ],
    "alpha_pattern": [{"q_proj": float("nan")}, {"q_proj": "64"}],
    "use_rslora": ["true"],
    "target_modules": [5, [{}]],
    "target_parameters": ["mlp.experts.gate_up_proj"],
    "layers_to_transform": ["1"],
    "layers_pattern": [["layers"]],
    "layer_replication": [[[0, 1], [0, 2]]],
    "trainable_token_indices": [[1, 2]],
    "lora_bias": [True],
    "alora_invocation_tokens": [[1]],
    "use_qalora": [True],
    "use_bdlora": [{"nblocks": 2}],
    "monteclora_config": [{"n": 1}, {}],
    "velora_config": [False],
    "something_of_a_later_peft": [3],
}
"""Values of adapter_config.json that no merge takes, by key."""


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in REFUSED.items() for value in values])
def test_other_kinds_are_refused_by_name(base: Path, adapter: Path, key: str, value: Any) -> None:
    change_config(adapter, **{key: value})
    with pytest.raises(VlmflowError, match=rf"adapter_config\.json: .*{key}") as refusal:
        plan(base, adapter)
    assert refusal.value.next_step


@pytest.mark.parametrize(("key", "value"), [("layers_to_transform", [0]), ("layers_pattern", "layers")])
def test_layers_by_number_need_a_list_of_modules(base: Path, adapter: Path, key: str, value: Any) -> None:
    """Such an adapter is refused by peft, which opens it after the merge."""
    change_config(adapter, target_modules=".*_proj", **{key: value})
    with pytest.raises(VlmflowError, match=rf"{key} = .*list of target_modules"):
        plan(base, adapter)


def test_dora_on_transposed_weights_is_refused(base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(base, tmp_path, use_dora=True)
    change_config(adapter, fan_in_fan_out=True)
    with pytest.raises(VlmflowError, match=r"use_dora = true: .*fan_in_fan_out"):
        plan(base, adapter)


def test_dora_on_an_embedding_is_refused(base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(base, tmp_path, target_modules=["embed_tokens"], use_dora=True)
    with pytest.raises(VlmflowError, match=r"embed_tokens\.lora_magnitude_vector: is DoRA on an embedding"):
        plan(base, adapter)


def test_biases_that_peft_did_not_save_are_missed(base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(base, tmp_path, bias="lora_only")
    with pytest.raises(VlmflowError, match=r"has no model\.layers\.0\.self_attn\..*\.bias, though it was trained"):
        plan(base, adapter)


def test_saved_module_that_is_missing(base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(base, tmp_path, modules_to_save=["lm_head"])
    change_tensors(adapter, lambda tensors: tensors.pop("base_model.model.lm_head.weight"))
    with pytest.raises(VlmflowError, match=r"has no lm_head\.weight, though it was trained"):
        plan(base, adapter)


def renamed(old: str, new: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[new] = tensors.pop(old)

    return change


def replaced(key: str, *shape: int) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__setitem__(key, torch.ones(shape))


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda tensors: tensors.pop(f"{KEY}.lora_B.weight"), rf"{LAYER}\.lora_B\.weight beside it"),
        (lambda tensors: tensors.pop(f"{KEY}.lora_A.weight"), rf"{LAYER}\.lora_A\.weight beside it"),
        (replaced(f"{KEY}.lora_A.weight", 4, 47), r"A \(4, 47\) and B \(32, 4\) of rank 4 do not fit"),
        (replaced(f"{KEY}.lora_B.weight", 0), r"B \(0,\) of rank 4 do not fit"),
        (replaced(f"{KEY}.lora_A.weight", 4, 48, 1, 1), f"{LAYER} is a convolution"),
        (replaced(f"{KEY}.lora_magnitude_vector", 32), "use_dora is False"),
        (replaced(f"{KEY}.lora_B.bias", 32), r"lora_B\.bias: is a kind of LoRA tensor"),
        (replaced(f"{KEY}.lora_embedding_A", 4, 48), r"has no .*lora_embedding_B beside it"),
        (replaced(f"{KEY}.weight", 32, 48), "is explained by neither modules_to_save nor bias"),
        (
            replaced("base_model.model.lm_head.weight", 97, 48),
            r"has shape \(97, 48\), lm_head\.weight of the base",
        ),
        (replaced("model.norm.weight", 48), r"model\.norm\.weight: does not begin with base_model\.model\."),
        (replaced("base_model.model.elsewhere.embed_tokens.weight", 2, 2), "the base has no tensor elsewhere"),
    ],
)
def test_tensor_without_a_place_is_refused(
    base: Path, adapter: Path, change: Callable[[Tensors], Any], fault: str
) -> None:
    """A tensor of the adapter that cannot be used is an error that names it."""
    change_tensors(adapter, change)
    with pytest.raises(VlmflowError, match=fault):
        plan(base, adapter)


def test_layer_that_the_base_lacks(base: Path, adapter: Path) -> None:
    """Another base, or one whose layers have other names on disk."""
    for part in ("lora_A.weight", "lora_B.weight"):
        change_tensors(adapter, renamed(f"{KEY}.{part}", f"{KEY.replace('layers.0', 'layers.7')}.{part}"))
    with pytest.raises(VlmflowError, match=r"the base has no tensor model\.layers\.7\.self_attn\.q_proj\.weight"):
        plan(base, adapter)


def test_two_tensors_for_one_place(base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(base, tmp_path, bias="all")
    change_tensors(adapter, lambda tensors: tensors.update({f"{KEY}.bias": tensors[f"{KEY}.base_layer.bias"] + 1}))
    with pytest.raises(VlmflowError, match=f"both replace {LAYER}.bias"):
        plan(base, adapter)


def test_base_of_integers_is_refused(base: Path, adapter: Path) -> None:
    weights = read_model_weights(base, file_names(base))
    (tensors,) = [shard.tensors for shard in weights.shards.values() if f"{LAYER}.weight" in shard.tensors]
    tensors[f"{LAYER}.weight"] = replace(tensors[f"{LAYER}.weight"], dtype="F8_E4M3")
    with pytest.raises(VlmflowError, match=rf"{LAYER}\.weight is F8_E4M3 in the base"):
        plan_updates(weights, read_trained(adapter), {})


def test_numbers_that_are_not_finite(base: Path, adapter: Path) -> None:
    change_tensors(adapter, lambda tensors: tensors[f"{KEY}.lora_B.weight"][3, 1].fill_(torch.nan))
    with pytest.raises(VlmflowError, match=rf"{KEY}\.lora_B\.weight holds NaN"):
        load_factors(partial(load_finite, read_trained(adapter)), plan(base, adapter)[f"{LAYER}.weight"])


def test_truncated_and_missing_adapters(adapter: Path) -> None:
    """An adapter that a full disk or a kill cut short."""
    path = adapter / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(VlmflowError, match=r"adapter_model\.safetensors: truncated"):
        read_trained(adapter)
    path.unlink()
    with pytest.raises(VlmflowError, match=r"adapter_model\.safetensors: is missing"):
        read_trained(adapter)
    save_file({}, path)
    with pytest.raises(VlmflowError, match="has no tensors"):
        read_trained(adapter)


def scaled_adapter(base: Path, folder: Path, scale: float) -> Path:
    """An adapter whose updates are `scale` times what write_adapter draws."""
    write_adapter(base, folder)
    weights = folder / "adapter_model.safetensors"
    tensors = load_file(weights)
    save_file({key: tensor * scale if "lora_B" in key else tensor for key, tensor in tensors.items()}, weights)
    return folder


def smoke_plan(tmp_path: Path, dtype: torch.dtype, scale: float) -> PlannedMerge:
    base = write_base(tmp_path / "base", dtype)
    return planned_merge(base, scaled_adapter(base, tmp_path / "adapter", scale), file_names(base))


@pytest.mark.parametrize(
    ("dtype", "scale", "visible"),
    [
        (torch.bfloat16, 1.0, True),
        (torch.bfloat16, 1e-3, False),
        (torch.float32, 1e-3, True),
        (torch.float32, 1e-9, False),
    ],
)
def test_an_update_that_rounding_hides_is_foreseen(
    tmp_path: Path, dtype: torch.dtype, scale: float, visible: bool
) -> None:
    described = smoke_plan(tmp_path, dtype, scale)
    assert described.logits_may_be_inconclusive != visible
    assert (described.rounding_leaves > 0.75) == visible


def test_adapted_tensors_are_counted_by_kind_of_layer(tmp_path: Path) -> None:
    """With a mixture of experts all-linear means attention alone, and nothing said so."""
    described = smoke_plan(tmp_path, torch.bfloat16, 1.0)
    kinds = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert described.layers == dict.fromkeys(kinds, 2)
    assert described.touched == 14 < described.tensors


def test_an_adapter_that_changed_nothing_has_no_share(tmp_path: Path) -> None:
    described = smoke_plan(tmp_path, torch.bfloat16, 0.0)
    assert (described.rounding_leaves, described.logits_may_be_inconclusive) == (None, False)


def test_the_plan_of_a_merge_refuses_what_the_merge_refuses(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    config = write_adapter(base, tmp_path / "adapter") / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"layer_replication": [[0, 1], [0, 2]]}))
    with pytest.raises(VlmflowError, match="layer_replication"):
        planned_merge(base, tmp_path / "adapter", file_names(base))
