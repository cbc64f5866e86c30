"""The estimate of families other than Qwen3 against real models of transformers and peft."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    CLIPVisionConfig,
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    InternVLConfig,
    LlamaConfig,
    LlavaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2_5_VLConfig,
    Qwen2Config,
    Qwen3MoeConfig,
    Qwen3VLMoeConfig,
)

from made_inputs import changed, mode_of
from vlmflow.config.strategies import FULL
from vlmflow.estimate.fake_pass import measure, measure_pictures
from vlmflow.estimate.fake_tensors import FUSED, LiveBytes, as_on_cuda
from vlmflow.estimate.memory import pass_of, trained_of
from vlmflow.estimate.meta_shape import kind_of
from vlmflow.estimate.run import Batch, TrainingMode
from vlmflow.estimate.shape import ALIGNER, TOWER, ModelShape, adapted, read_shape
from vlmflow.swift.model_layers import starred

# Where a process's first backward pass is on fake tensors, PyTorch starts threads, and refuses all passes in its forks,
# such as those of other tests. After a real one, it does not.
torch.ones((), requires_grad=True).backward()

SIZES = {
    "vocab_size": 1_500,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TEXT = SIZES | {"head_dim": 32}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
GPT2 = {"vocab_size": 1_500, "n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": 4_096}
VISION = {"hidden_size": 96, "intermediate_size": 200, "num_hidden_layers": 3, "num_attention_heads": 4}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]}}
IDS = {"image_token_id": 999}
QWEN = {"depth": 3, "out_hidden_size": 128, "num_heads": 4, "hidden_size": 96, "intermediate_size": 200}
FIXED = {"crop_size": {"height": 56, "width": 56}, "size": {"shortest_edge": 56}}


@dataclass(frozen=True)
class Family:
    """A small model. processor: its image processor's file, if it sees. targets: what gets an adapter."""

    config: PreTrainedConfig
    processor: dict[str, Any] = field(default_factory=dict)
    targets: tuple[str, ...] = ("all-linear",)
    eager: bool = False

    @property
    def mode(self) -> TrainingMode:
        """LoRA on the language model."""
        attention = "eager" if self.eager else "sdpa"
        return mode_of({"lora": {"target_modules": list(self.targets)}, "attention": attention})


FAMILIES = {
    "llama": Family(LlamaConfig(**TEXT, tie_word_embeddings=True)),
    "mistral": Family(MistralConfig(**TEXT)),
    "gemma2": Family(Gemma2Config(**TEXT, sliding_window=1_024)),
    "gemma3_text": Family(Gemma3TextConfig(**TEXT | {"num_hidden_layers": 7}, sliding_window=512)),
    "phi3": Family(Phi3Config(**SIZES, pad_token_id=0)),
    "gpt2": Family(GPT2Config(**GPT2), targets=("c_attn", "c_proj", "c_fc")),
    "gpt_oss": Family(GptOssConfig(**TEXT | EXPERTS), eager=True),
    "mixtral": Family(MixtralConfig(**SIZES | EXPERTS)),
    "qwen2": Family(Qwen2Config(**SIZES)),
    "qwen3_moe": Family(Qwen3MoeConfig(**TEXT, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=96)),
    "gemma3": Family(
        Gemma3Config(
            text_config=TEXT | {"sliding_window": 512},
            vision_config=VISION | {"image_size": 64, "patch_size": 8},
            mm_tokens_per_image=16,
            **IDS,
        ),
        {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 64, "width": 64}},
    ),
    "qwen2_5_vl": Family(
        Qwen2_5_VLConfig(
            text_config=SIZES | ROPE,
            vision_config=QWEN | {"window_size": 56, "fullatt_block_indexes": [1]},
            **IDS,
        ),
        {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14},
    ),
    "llava": Family(
        LlavaConfig(
            text_config=LlamaConfig(**SIZES),
            vision_config=CLIPVisionConfig(**VISION, image_size=56, patch_size=14),
            **IDS,
        ),
        {"image_processor_type": "CLIPImageProcessor"} | FIXED,
    ),
    "internvl": Family(
        InternVLConfig(
            text_config=Qwen2Config(**SIZES),
            vision_config=VISION | {"image_size": [56, 56], "patch_size": [14, 14]},
            **IDS,
        ),
        {"image_processor_type": "GotOcr2ImageProcessor", "size": {"height": 56, "width": 56}},
    ),
    "qwen3_vl_moe": Family(
        Qwen3VLMoeConfig(
            text_config=TEXT | ROPE | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96},
            vision_config=QWEN | {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
            **IDS,
        ),
        {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 16},
    ),
}
SEEING = [name for name, family in FAMILIES.items() if family.processor]


def shape_of(family: Family, folder: Path) -> ModelShape:
    family.config.save_pretrained(folder)
    if family.processor:
        (folder / "preprocessor_config.json").write_text(json.dumps(family.processor))
    return read_shape(folder)


def model_of(family: Family, dtype: torch.dtype = torch.float32, device: str = "meta") -> Any:
    kind = AutoModelForImageTextToText if family.processor else AutoModelForCausalLM
    torch.manual_seed(1)
    with torch.device(device):
        return kind.from_config(family.config, dtype=dtype, attn_implementation="eager" if family.eager else FUSED)


@pytest.mark.parametrize("name", FAMILIES)
def test_all_weights_and_those_of_an_adapter_are_counted(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    shape, model = shape_of(family, tmp_path), model_of(family)
    kind = kind_of(model)
    there = dict.fromkeys(shape.of.weights, 0)
    for parameter, weight in model.named_parameters():
        there[kind.part_of(parameter)] += weight.numel()
    assert shape.of.weights == there
    assert bool(kind.parts) == bool(family.processor)
    assert all(there.values())
    mode = changed(family.mode, freeze=[], attention="sdpa") if family.processor else family.mode
    count = sum(weight.numel() for weight in with_adapter(model, shape, mode).parameters() if weight.requires_grad)
    assert trained_of(shape, mode) == count > 0


def with_adapter(model: Any, shape: ModelShape, mode: TrainingMode) -> Any:
    lora = mode.settings.lora
    names = {matrix.name for matrix in adapted(shape, mode.trained, lora.target_modules)}
    linear = "|".join(
        name.replace(".", r"\.")
        for name, module in model.named_modules()
        if starred(name) in names and hasattr(module, "weight")
    )
    adapter = LoraConfig(r=lora.rank, lora_dropout=lora.dropout, target_modules=linear)
    return get_peft_model(model, adapter)


@pytest.mark.slow
@pytest.mark.parametrize("again", [True, False], ids=["checkpointing", "all kept"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_pass_of_2048_tokens_has_the_bytes_of_real_tensors(name: str, again: bool, tmp_path: Path) -> None:
    family, tokens, trained = FAMILIES[name], 2_048, 700
    mode = changed(family.mode, gradient_checkpointing=again)
    shape = shape_of(family, tmp_path)
    windowed = shape.of.window is not None and tokens > shape.of.window
    needed = measure(pass_of(shape, mode, windowed=windowed)).of(Batch(1, tokens, tokens, trained))
    model = with_adapter(model_of(family, torch.bfloat16, "cpu").train(), shape, mode)
    plain = model.get_base_model()
    if again:
        plain.gradient_checkpointing_enable({"use_reentrant": False})
    plain.enable_input_require_grads()
    with as_on_cuda(torch.bfloat16 if family.eager else None, windowed=windowed):
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        for weight in weights:
            weight.grad = torch.zeros_like(weight)
        ids, labels = torch.zeros(1, tokens, dtype=torch.long), torch.zeros(1, trained, dtype=torch.long)
        kinds = {"token_type_ids": torch.zeros_like(ids)} if name == "gemma3" else {}
        held = [*model.parameters(), *(weight.grad for weight in weights), *model.buffers(), ids, labels]
        with LiveBytes([*held, *kinds.values()]) as live:
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(input_ids=ids, labels=labels, logits_to_keep=trained, use_cache=False, **kinds).loss
            loss.backward()
    assert needed.kept + max(needed.layer, needed.logits) == pytest.approx(max(live.moments), rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("name", SEEING)
def test_pictures_need_more_bytes_and_operations_with_a_trained_tower(name: str, tmp_path: Path) -> None:
    shape = shape_of(FAMILIES[name], tmp_path)
    frozen, trained = (
        measure_pictures(pass_of(shape, mode_of({"freeze": frozen, "gradient_checkpointing": False}, tuner=FULL)))
        for frozen in ([TOWER, ALIGNER], [ALIGNER])
    )
    assert 0 < frozen.kept.of(512) < trained.kept.of(512)
    assert frozen.kept.of(512) <= frozen.passing.of(512)
    assert frozen.forward == frozen.training
    assert trained.training.of(512) > 2 * trained.forward.of(512)
