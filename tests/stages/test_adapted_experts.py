"""Adapters of experts (peft's `target_parameters`): the merge, and the proof of its result."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Glm4MoeConfig,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3VLMoeConfig,
)

from made_inputs import settings_of
from stages import estimate_run
from tiny_models import file_names, randomise, tensors_of
from vlmflow.config.run_settings import TrainSettings
from vlmflow.config.strategies import LORA as LORA_TUNER
from vlmflow.config.strategies import QLORA, Tuner
from vlmflow.core.errors import VlmflowError
from vlmflow.fetch.placed import write_small_files
from vlmflow.merging.merge import merge_weights, planned_merge
from vlmflow.merging.verify_tensors import verify_tensors
from vlmflow.swift.adapter_targets import adapter_targets
from vlmflow.swift.arguments import Targets
from vlmflow.swift.model_layers import layers_of

COUNT = 5
WIDTH = 32
TEXT = {
    "vocab_size": 96,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}
OWN_WIDTH = TEXT | {"intermediate_size": 80, "moe_intermediate_size": WIDTH}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 2, 2]}}
VISION = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 48}

CONFIGS: dict[str, PreTrainedConfig] = {
    "a matrix per expert": Qwen3MoeConfig(**OWN_WIDTH, num_experts=COUNT),
    "other names on disk": MixtralConfig(**TEXT, intermediate_size=WIDTH, num_local_experts=COUNT),
    "in by out, interleaved": GptOssConfig(**TEXT, intermediate_size=WIDTH, num_local_experts=COUNT),
    "dense layers and shared experts": Glm4MoeConfig(
        **OWN_WIDTH, n_routed_experts=COUNT, n_shared_experts=1, first_k_dense_replace=1, n_group=1, topk_group=1
    ),
    "transposed on disk": Qwen3VLMoeConfig(
        text_config=OWN_WIDTH | ROPE | {"num_experts": COUNT},
        vision_config=VISION | {"deepstack_visual_indexes": [0]},
        tie_word_embeddings=False,
    ),
}
"""Models by the form in which their files have experts."""

LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
OF_EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
# Powers of two: with other scales peft, which scales the product, rounds in another order.
PATTERNS = {"rank_pattern": {"experts.gate_up_proj": 2}, "alpha_pattern": {r"layers\.1\.mlp\..*down_proj": 16}}


def write(folder: Path, kind: str, **lora: Any) -> Path:
    """Write a base in bfloat16, an adapter of its attention and experts, and their merge."""
    torch.manual_seed(1)
    config = CONFIGS[kind]
    base = _kind(config).from_config(config, dtype=torch.bfloat16)
    randomise(base, 0.05)
    base.save_pretrained(folder / "base", max_shard_size="60KB")
    if kind == "transposed on disk":  # as the hub has them; transformers writes them as in memory
        for file in (folder / "base").glob("*.safetensors"):
            save_file({name: _turned(name, tensor) for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json", "preprocessor_config.json"):
        (folder / "base" / name).write_text("{}")
    with_experts = LoraConfig(**(LORA | {"target_parameters": OF_EXPERTS} | lora))
    adapted = get_peft_model(base, with_experts, autocast_adapter_dtype=False)
    randomise(adapted, 0.1)
    adapted.save_pretrained(folder / "adapter")
    merge_weights(folder / "base", folder / "adapter", folder / "merged", file_names(folder / "base"), 2)
    return folder


def _kind(config: PreTrainedConfig) -> Any:
    return AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM


def _turned(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(1, 2).contiguous() if name.endswith(tuple(OF_EXPERTS)) else tensor


def saved_by_peft(folder: Path, kind: str) -> dict[str, torch.Tensor]:
    """Return the tensors of peft's own merge in float32, rounded once, as transformers saves them."""
    base: PreTrainedModel = _kind(CONFIGS[kind]).from_pretrained(folder / "base", dtype=torch.float32)
    merged = PeftModel.from_pretrained(base, str(folder / "adapter")).merge_and_unload().to(torch.bfloat16)
    merged.save_pretrained(folder / "peft")
    saved = tensors_of(folder / "peft")
    return {name: _turned(name, saved[name]) for name in saved} if kind == "transposed on disk" else saved


def verify(folder: Path, merged: Path) -> Any:
    return verify_tensors(folder / "base", folder / "adapter", merged, file_names(folder / "base"), 2)


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_merge_is_that_of_peft_and_the_proof_accepts_it(kind: str, tmp_path: Path) -> None:
    folder = write(tmp_path, kind, **PATTERNS)
    merged, expected = tensors_of(folder / "merged"), saved_by_peft(folder, kind)
    assert merged.keys() == expected.keys()
    assert [name for name in merged if not torch.equal(merged[name], expected[name])] == []
    base = tensors_of(folder / "base")
    changed = {name for name in merged if not torch.equal(merged[name], base[name])}
    experts = {name for name in merged if ".experts." in name and not name.endswith("bias")}
    assert changed == experts | {name for name in merged if "q_proj.weight" in name}
    proof = verify(folder, folder / "merged")
    assert (proof.touched, proof.untouched) == (len(changed), len(merged) - len(changed))
    described = planned_merge(folder / "base", folder / "adapter", file_names(folder / "base"))
    assert (described.touched, described.rounding_leaves) == (len(changed), pytest.approx(1.0, abs=0.01))


@pytest.fixture(
    scope="module",
    params=[
        "in by out, interleaved",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("a matrix per expert", "transposed on disk")),
    ],
)
def right(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("right"), request.param)


Matrices = tuple[list[torch.Tensor], list[torch.Tensor]]
"""Each expert's gate and up together (out by in), and its down; views of a merged folder's tensors, or copies."""


def wrong_expert(base: Matrices, merged: Matrices) -> None:
    """The update of expert 1 is on expert 3, and the other way round."""
    for plain, one in zip(base, merged, strict=True):
        first, third = one[1] - plain[1], one[3] - plain[3]
        one[1].copy_(plain[1] + third)
        one[3].copy_(plain[3] + first)


def gate_and_up(base: Matrices, merged: Matrices) -> None:
    """The update of the gate is on up, and the other way round."""
    for plain, one in zip(base[0], merged[0], strict=True):
        update = one - plain
        one.copy_(plain + update.roll(WIDTH, 0))


def neighbours_scale(base: Matrices, merged: Matrices) -> None:
    """An expert's update has another's scale (alpha / r): here half of it."""
    merged[1][2].copy_(base[1][2] + (merged[1][2] - base[1][2]) / 2)


FAULTS: dict[str, tuple[Callable[[Matrices, Matrices], None], str]] = {
    "wrong expert": (wrong_expert, r"experts\.(1\.|3\.|gate_up_proj\[[13]\]|down_proj\[[13]\])"),
    "gate and up": (gate_and_up, r"experts\.(\d\.(gate|up)_proj|gate_up_proj\[\d\])"),
    "scale of a neighbour": (neighbours_scale, r"experts\.(2\.down_proj|down_proj\[2\])"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(right: Path, fault: str, tmp_path: Path) -> None:
    plant, named = FAULTS[fault]
    wrong = shutil.copytree(right / "merged", tmp_path / "wrong")
    base, merged = tensors_of(right / "base"), tensors_of(wrong)
    layer = next(name.partition(".experts.")[0] for name in sorted(merged) if ".experts." in name)
    changed = _matrices(merged, layer)
    plant(_matrices(base, layer), changed)
    _write_back(merged, layer, changed)
    for file in wrong.glob("*.safetensors"):
        save_file({name: merged[name] for name in load_file(file)}, file, {"format": "pt"})
    with pytest.raises(VlmflowError, match=rf"tensor {layer}\.{named}.*, row .* ulps away"):
        verify(right, wrong)


def _is_stacked(tensors: dict[str, torch.Tensor], layer: str) -> bool:
    return f"{layer}.experts.gate_up_proj" in tensors


def _matrices(tensors: dict[str, torch.Tensor], layer: str) -> Matrices:
    """Return copies in float32. In all layouts here, a stack on disk has in by out matrices."""
    if _is_stacked(tensors, layer):
        up, down = (
            tensors[f"{layer}.experts.{name}"].float().transpose(1, 2) for name in ("gate_up_proj", "down_proj")
        )
        return list(up.contiguous()), list(down.contiguous())
    found: Matrices = [], []
    for expert in range(COUNT):
        gate, up, down = (tensors[f"{layer}.experts.{expert}.{name}_proj.weight"] for name in ("gate", "up", "down"))
        found[0].append(torch.cat([gate, up]).float())
        found[1].append(down.float())
    return found


def _write_back(tensors: dict[str, torch.Tensor], layer: str, matrices: Matrices) -> None:
    if _is_stacked(tensors, layer):
        for name, found in zip(("gate_up_proj", "down_proj"), matrices, strict=True):
            tensors[f"{layer}.experts.{name}"].copy_(torch.stack(found).transpose(1, 2))
        return
    for expert in range(COUNT):
        gate, up = matrices[0][expert].chunk(2)
        for name, values in (("gate", gate), ("up", up), ("down", matrices[1][expert])):
            tensors[f"{layer}.experts.{expert}.{name}_proj.weight"].copy_(values)


def test_an_adapter_that_does_not_fit_its_experts_is_refused(right: Path, tmp_path: Path) -> None:
    adapter = shutil.copytree(right / "adapter", tmp_path / "adapter")
    weights = load_file(adapter / "adapter_model.safetensors")
    name = next(name for name in sorted(weights) if name.endswith("experts.lora_A.weight"))
    save_file(weights | {name: weights[name][:-1].clone()}, adapter / "adapter_model.safetensors")
    with pytest.raises(VlmflowError, match=r"of rank 4 do not fit the 5 experts of .*mlp\.experts\.down_proj"):
        planned_merge(right / "base", adapter, file_names(right / "base"))


SHARED = [f"mlp.{where}{name}_proj.weight" for where in ("", "shared_experts.") for name in ("gate", "up", "down")]
ATTENTION = [f"self_attn.{name}_proj" for name in "qkvo"]

TARGETS: dict[str, tuple[Targets | None, Targets]] = {
    "a matrix per expert": (None, Targets(["all-linear"], OF_EXPERTS)),
    "other names on disk": (None, Targets(["all-linear"], OF_EXPERTS)),
    "in by out, interleaved": (None, Targets(["all-linear"], OF_EXPERTS)),
    "dense layers and shared experts": (Targets(ATTENTION, []), Targets(ATTENTION, [*OF_EXPERTS, *SHARED])),
    "transposed on disk": (None, Targets(["all-linear"], OF_EXPERTS)),
}
"""What gets an adapter without `experts`, and with it; None: what the settings say."""


def configured(folder: Path, kind: str) -> Path:
    config = CONFIGS[kind]
    known = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING if hasattr(config, "vision_config") else MODEL_FOR_CAUSAL_LM_MAPPING
    (folder / "config.json").write_text(
        json.dumps(config.to_dict() | {"architectures": [known[type(config)].__name__]})
    )
    return folder


def targets(folder: Path, tuner: Tuner = LORA_TUNER, **lora: Any) -> Targets | None:
    return adapter_targets(folder, TrainSettings(lora=lora), tuner)


@pytest.mark.parametrize("kind", CONFIGS)
def test_experts_are_adapted_if_they_are_meant_and_no_others(kind: str, tmp_path: Path) -> None:
    folder = configured(tmp_path, kind)
    assert (targets(folder), targets(folder, experts=True)) == TARGETS[kind]
    with pytest.raises(VlmflowError, match=r"the model has experts .*, which tuner qlora cannot quantise"):
        targets(folder, QLORA)


def test_peft_adapts_what_is_named_and_nothing_else(tmp_path: Path) -> None:
    """It takes the names of dense layers and of shared experts for those of the experts."""
    kind = "dense layers and shared experts"
    folder = configured(tmp_path, kind)
    for experts in (False, True):
        named = targets(folder, experts=experts)
        assert named
        model = AutoModelForCausalLM.from_config(CONFIGS[kind])
        dropout = TrainSettings(lora={"experts": experts}).lora.dropout
        lora = LoraConfig(r=4, lora_dropout=dropout, target_modules=named.modules, target_parameters=named.parameters)
        adapted = {each.name for each in layers_of(get_peft_model(model, lora)) if each.trained}
        linear = [f"model.layers.*.{name}" for name in ATTENTION]
        others = ["experts", *(name.removeprefix("mlp.").removesuffix(".weight") for name in SHARED)]
        assert adapted == {*linear, *(f"model.layers.*.mlp.{name}" for name in others if experts)}


def test_what_a_model_cannot_do_is_refused_by_name(tmp_path: Path) -> None:
    folder = configured(tmp_path, "dense layers and shared experts")
    with pytest.raises(
        VlmflowError, match=r"lora\.target_modules: mlp\.up_proj: in this model peft takes the name for"
    ):
        targets(folder, target_modules=["q_proj", "mlp.up_proj"])
    with pytest.raises(VlmflowError, match=r"lora\.experts: true, but the model has no experts that are not frozen"):
        adapter_targets(folder, TrainSettings(lora={"experts": True}, freeze=["language_model"]), LORA_TUNER)
    (folder / "config.json").write_text(json.dumps(LlamaConfig(**TEXT, intermediate_size=80).to_dict()))
    assert targets(folder) is None
    with pytest.raises(VlmflowError, match=r"lora\.experts: true, but the model has no experts \("):
        targets(folder, experts=True)


def test_a_model_without_experts_is_refused_before_a_gpu_is_requested(tmp_path: Path) -> None:
    """By the stage that only has config.json, whether or not it estimates anything."""
    (tmp_path / "config.json").write_text(json.dumps(LlamaConfig(**TEXT, intermediate_size=80).to_dict()))
    write_small_files(tmp_path / "files", tmp_path, ["config.json"], "model", None)
    settings = settings_of({"lora": {"experts": True}}, estimate="ignore")
    lengths = dict.fromkeys(("train", "val", "summary"), tmp_path / "none")
    with pytest.raises(VlmflowError, match="the model has no experts"):
        estimate_run.main(**lengths, model_files=tmp_path / "files", estimate=tmp_path / "e.json", settings=settings)
