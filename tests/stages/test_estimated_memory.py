"""The estimate's memory against real models of transformers and peft: exact states and passes, pictures within 10 %."""

import json
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from swift.model.model_arch import get_model_arch
from swift.utils.transformers_utils import find_all_linears, get_multimodal_target_regex
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    BitsAndBytesConfig,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
)

from made_inputs import changed, mode_of
from vlmflow.config.strategies import DDP, FSDP2, QLORA, ZERO2, ZERO3, Strategy, Tuner
from vlmflow.config.strategies import FULL as FULL_TUNER
from vlmflow.config.strategies import LORA as LORA_TUNER
from vlmflow.estimate.fake_pass import measure
from vlmflow.estimate.fake_tensors import FUSED, LiveBytes, WithWholeNumbers, as_on_cuda, make_fake
from vlmflow.estimate.memory import base_bytes, pass_of, picture_tower, states, trained_of
from vlmflow.estimate.run import Batch, TrainingMode
from vlmflow.estimate.shape import ALIGNER, LANGUAGE, PARTS, TOWER, ModelShape, read_shape, weights_of

# Where a process's first backward pass is on fake tensors, PyTorch starts threads, and refuses all passes in its forks,
# such as those of other tests. After a real one, it does not.
torch.ones((), requires_grad=True).backward()

TEXT = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
TOWER_CONFIG = {
    "depth": 4,
    "hidden_size": 48,
    "intermediate_size": 100,
    "num_heads": 4,
    "out_hidden_size": 64,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0, 2],
}
VISION = {"vision_config": TOWER_CONFIG}

CONFIGS: dict[str, PreTrainedConfig] = {
    "qwen3": Qwen3Config(**TEXT),
    "qwen3, tied": Qwen3Config(**TEXT, tie_word_embeddings=True, attention_bias=True),
    "qwen3 with experts": Qwen3MoeConfig(**TEXT, **EXPERTS),
    "qwen3-vl": Qwen3VLConfig(text_config=TEXT, **VISION),
    "qwen3 with experts in some layers": Qwen3MoeConfig(**TEXT, **EXPERTS, mlp_only_layers=[0]),
    "qwen3-vl, tied": Qwen3VLConfig(text_config=TEXT, **VISION, tie_word_embeddings=True),
    "qwen3-vl with experts": Qwen3VLMoeConfig(text_config=TEXT | EXPERTS, **VISION),
}

PROCESSOR = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 16}

SWIFT_NAMES = ("llm", "vit", "aligner")
"""ms-swift's names of the parts, in the order of PARTS."""

FREEZABLE = [(), (TOWER,), (ALIGNER,), (TOWER, ALIGNER), (LANGUAGE,)]


def frozen_parts() -> list[Any]:
    """Return each model with the parts that may be frozen; one that sees has all of them, the others are slow."""
    return [
        pytest.param(
            name,
            frozen,
            id=f"{name}-{'+'.join(sorted(frozen)) or 'nothing'}",
            marks=[] if frozen in ((), (TOWER, ALIGNER)) or name == "qwen3-vl" else [pytest.mark.slow],
        )
        for name, config in CONFIGS.items()
        for frozen in FREEZABLE
        if "some layers" not in name  # peft adapts experts there
        and (hasattr(config, "vision_config") or LANGUAGE not in frozen)  # something is trained
    ]


def model_of(config: PreTrainedConfig, dtype: torch.dtype, device: str = "meta") -> Any:
    kind = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    torch.manual_seed(1)
    with torch.device(device):
        return kind.from_config(config, dtype=dtype).train()


def shape_of(config: PreTrainedConfig, folder: Path) -> ModelShape:
    config.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return read_shape(folder)


def part_of(parameter: str) -> str:
    """Return the part of a model to which a parameter belongs."""
    return ALIGNER if "merger" in parameter else TOWER if "visual" in parameter else LANGUAGE


def with_adapter(model: Any, mode: TrainingMode) -> Any:
    """Add an adapter to the layers that ms-swift chooses for all-linear."""
    with_pictures = hasattr(model.config, "vision_config")
    arch = get_model_arch("qwen3_vl") if with_pictures else None
    model.model_meta = SimpleNamespace(model_arch=arch, is_multimodal=with_pictures)
    model.model_info = SimpleNamespace(is_moe_model="moe" in model.config.model_type, quant_method=None)
    if with_pictures:
        frozen = {f"freeze_{name}": part not in mode.trained for name, part in zip(SWIFT_NAMES, PARTS, strict=True)}
        targets = get_multimodal_target_regex(model, **frozen)
    else:
        targets = find_all_linears(model)
    adapter = mode.settings.lora
    lora = LoraConfig(r=adapter.rank, lora_dropout=adapter.dropout, target_modules=targets, use_dora=adapter.dora)
    return get_peft_model(model, lora, autocast_adapter_dtype=mode.trained_bytes == 4)


def prepared(config: PreTrainedConfig, mode: TrainingMode, device: str = "meta") -> Any:
    """Return a model as the trainer prepares it for a way to train."""
    model = model_of(config, torch.bfloat16 if mode.base == 2 else torch.float32, device)
    if not mode.is_full:
        return with_adapter(model, mode)
    for name, weight in model.named_parameters():
        weight.requires_grad_(part_of(name) in mode.trained)
    return model


def trained(model: Any) -> list[torch.nn.Parameter]:
    return [weight for weight in model.parameters() if weight.requires_grad]


@pytest.mark.parametrize("name", CONFIGS)
def test_all_weights_are_counted(name: str, tmp_path: Path) -> None:
    model = model_of(CONFIGS[name], torch.float32)
    shape = shape_of(CONFIGS[name], tmp_path)
    counted = shape.of.weights
    there = dict.fromkeys(counted, 0)
    for parameter, weight in model.named_parameters():
        there[part_of(parameter)] += weight.numel()
    assert counted == there
    assert weights_of(shape) == sum(there.values())


@pytest.mark.parametrize(("name", "frozen"), frozen_parts())
def test_an_adapter_has_the_weights_that_peft_trains(name: str, frozen: tuple[str, ...], tmp_path: Path) -> None:
    """ms-swift chooses the layers; of models with experts, the experts get none."""
    config = CONFIGS[name]
    for lora in ({"rank": 4}, {"rank": 3, "dora": True}):
        mode = mode_of({"freeze": list(frozen), "lora": lora})
        count = sum(weight.numel() for weight in trained(prepared(config, mode)))
        assert trained_of(shape_of(config, tmp_path), mode) == count


def test_named_layers_get_an_adapter_wherever_peft_finds_the_name(tmp_path: Path) -> None:
    config = CONFIGS["qwen3-vl"]
    for targets in (("q_proj", "v_proj"), ("proj", "down_proj"), ("linear_fc1",)):
        model = get_peft_model(model_of(config, torch.float32), LoraConfig(r=4, target_modules=list(targets)))
        mode = mode_of({"lora": {"rank": 4, "target_modules": list(targets)}})
        assert trained_of(shape_of(config, tmp_path), mode) == sum(weight.numel() for weight in trained(model))


@pytest.mark.parametrize("name", ["qwen3", "qwen3-vl"])
@pytest.mark.parametrize("tuner", [LORA_TUNER, FULL_TUNER], ids=lambda tuner: tuner.name)
def test_what_is_kept_between_steps_has_the_bytes_of_a_real_training(tuner: Tuner, name: str, tmp_path: Path) -> None:
    """Weights, gradients, AdamW's moments."""
    config = CONFIGS[name]
    mode = mode_of({"freeze": [TOWER], "lora": {"rank": 4}}, tuner=tuner)
    model = prepared(config, mode, "cpu")
    for weight in trained(model):
        weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.AdamW(trained(model), fused=True)
    optimizer.step()
    moments = [value for state in optimizer.state.values() for key, value in state.items() if key != "step"]
    kept = states(shape_of(config, tmp_path), mode)
    adapter = 0 if mode.is_full else sum(weight.nbytes for weight in trained(model))
    assert kept.adapter == adapter
    assert kept.weights == sum(weight.nbytes for weight in model.parameters()) - adapter
    assert kept.gradients == sum(weight.grad.nbytes for weight in trained(model))
    assert kept.optimizer == sum(value.nbytes for value in moments)


def test_quantised_weights_have_the_bytes_that_bitsandbytes_uses(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}  # whole blocks of 64 × 256 weights
    config = Qwen3Config(**TEXT | sizes)
    shape = shape_of(config, tmp_path)
    model_of(config, torch.bfloat16, "cpu").save_pretrained(tmp_path / "model")
    for double in (True, False):
        how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=double)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", quantization_config=how, dtype=torch.bfloat16)
        used = 0
        for weight in model.parameters():
            used += weight.nbytes
            if state := getattr(weight, "quant_state", None):
                used += state.absmax.nbytes + (state.state2.absmax.nbytes if state.nested else 0)
        assert base_bytes(shape, mode_of({"quantisation": {"double": double}}, tuner=QLORA)) == used


@pytest.mark.parametrize(
    ("strategy", "weights", "parts_of_state"),
    [(DDP, 1, 1), (ZERO2, 1, 4), (ZERO3, 4, 4), (FSDP2, 4, 4)],
    ids=["ddp", "zero2", "zero3", "fsdp2"],
)
def test_strategies_cut_what_they_share(strategy: Strategy, weights: int, parts_of_state: int, tmp_path: Path) -> None:
    """DeepSpeed trains 16-bit weights, and keeps float32 copies of them with the moments."""
    shape = shape_of(CONFIGS["qwen3"], tmp_path)
    mode = mode_of(tuner=FULL_TUNER, strategy=strategy, processes=4)
    count = weights_of(shape)
    each, moments = (2, 12) if strategy.engine == "deepspeed" else (4, 8)
    kept = states(shape, mode)
    assert kept.weights == -(-count * each // weights)
    assert kept.gradients == -(-count * each // parts_of_state)
    assert kept.optimizer == -(-count * moments // parts_of_state)
    moved = replace(strategy, offloads=frozenset({"gradients", "optimizer"}))
    on_host = states(shape, replace(mode, strategy=moved))
    assert (on_host.optimizer, on_host.gradients) == (0, 0)
    assert on_host.host == kept.optimizer + kept.gradients


@dataclass(frozen=True)
class Case:
    """A model and a batch whose activations are measured.

    sizes: of the language model: vocabulary, width, inner width, layers, heads, key heads, width of a head.
    text: tokens of the row that are trained. untrained: others. side: tokens along one side of a square picture; 0 for
    none. tower: width and inner width. more: further keys of the configuration. mask: the type of
    attention's mask.
    """

    name: str
    mode: TrainingMode
    sizes: tuple[int, ...]
    text: int
    untrained: int = 0
    side: int = 0
    tower: tuple[int, int] = (96, 256)
    more: dict[str, Any] = field(default_factory=dict)
    mask: torch.dtype | None = None

    @property
    def config(self) -> PreTrainedConfig:
        names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        text = dict(zip((*names, "num_key_value_heads", "head_dim"), self.sizes, strict=True))
        if not self.side:
            return (Qwen3MoeConfig if "num_experts" in self.more else Qwen3Config)(**text, **self.more)
        half = text["head_dim"] // 2
        section = [half - 2 * (half // 3), half // 3, half // 3]
        rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": section, "mrope_interleaved": True}
        tower = TOWER_CONFIG | {"hidden_size": self.tower[0], "intermediate_size": self.tower[1]}
        last = text["vocab_size"] - 1
        return Qwen3VLConfig(
            text_config=text | {"rope_parameters": rope},
            vision_config=tower | {"out_hidden_size": text["hidden_size"]},
            image_token_id=last,
            video_token_id=last - 1,
            vision_start_token_id=last - 2,
        )

    @property
    def batch(self) -> Batch:
        tokens = self.text + self.untrained + self.side**2
        return Batch(1, tokens, tokens, self.text, pictures=self.side**2)


LORA = mode_of({"gradient_checkpointing": False})
FULL = mode_of({"gradient_checkpointing": False}, tuner=FULL_TUNER)
AGAIN = {"gradient_checkpointing": True}
EVERYTHING: dict[str, Any] = {"freeze": []}


def with_zero(mode: TrainingMode) -> TrainingMode:
    return replace(mode, strategy=ZERO2, processes=2)


SMALL = (1_500, 256, 704, 4, 8, 2, 64)
WIDE = (8_000, 320, 896, 4, 5, 5, 64)

QWEN3_8B = (151_936, 4_096, 12_288, 36, 32, 8, 128)

EXPERTS_OF_A_PASS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 96}

LANGUAGE_ALONE = [
    Case("LoRA", LORA, SMALL, 777),
    Case("LoRA, checkpointing", changed(LORA, **AGAIN), SMALL, 1_500),
    Case("LoRA, checkpointing, large vocabulary", changed(LORA, **AGAIN), WIDE, 900, untrained=300),
    Case("LoRA, checkpointing, no dropout", changed(LORA, lora={"dropout": 0.0}, **AGAIN), SMALL, 512),
    Case("DoRA, checkpointing", changed(LORA, lora={"dora": True}, **AGAIN), SMALL, 512),
    Case("LoRA, ZeRO, checkpointing", with_zero(changed(LORA, **AGAIN)), SMALL, 1_024),
    Case("LoRA in float32", changed(LORA, dtype="float32", **AGAIN), SMALL, 640),
    Case("LoRA, eager", changed(LORA, attention="eager", **AGAIN), SMALL, 300, mask=torch.bfloat16),
    Case("LoRA, with a mask for padding", changed(LORA, **AGAIN), SMALL, 300, mask=torch.bool),
    Case("LoRA, experts", changed(LORA, **AGAIN), SMALL, 700, more=EXPERTS_OF_A_PASS),
    Case("full", FULL, WIDE, 300, untrained=700),
    Case("full, checkpointing", changed(FULL, **AGAIN), SMALL, 2_048),
    Case("full, tied", changed(FULL, **AGAIN), WIDE, 30, more={"tie_word_embeddings": True}),
    Case("full, ZeRO, checkpointing", with_zero(changed(FULL, **AGAIN)), WIDE, 600, untrained=1_000),
]

WITH_PICTURES = [
    Case("VL, LoRA", LORA, SMALL, 300, side=8),
    Case("VL, LoRA, checkpointing", changed(LORA, **AGAIN), SMALL, 500, side=12),
    Case("VL, LoRA everywhere", changed(LORA, **EVERYTHING), SMALL, 250, side=10),
    Case("VL, LoRA everywhere, checkpointing", changed(LORA, **EVERYTHING, **AGAIN), SMALL, 400, side=12),
    Case("VL, full everywhere", changed(FULL, **EVERYTHING), SMALL, 300, side=8),
    Case("VL, full, checkpointing, aligner", changed(FULL, freeze=[TOWER], **AGAIN), SMALL, 400, side=12),
    Case("VL, mostly pictures", changed(LORA, **AGAIN), (1_000, 128, 384, 4, 4, 2, 32), 100, side=18, tower=(64, 160)),
]


def estimated(case: Case, folder: Path) -> int:
    """Return the same from passes on fake tensors of other rows, with two and with three layers."""
    shape = shape_of(case.config, folder)
    language = measure(pass_of(shape, case.mode, padded=case.mask is torch.bool)).of(case.batch)
    pictures = picture_tower(shape, case.mode, case.batch)
    return max(language.kept + pictures.kept + max(language.layer, language.logits), pictures.passing)


def measured(case: Case, *, fake: bool = False) -> int:
    """Return the bytes that one forward and backward pass needs, beside weights and gradients.

    fake: of tensors without data, for models of any size. transformers looks at the ids of pictures, which need data.
    """
    config = case.config
    config._attn_implementation = "eager" if case.mode.settings.attention == "eager" else FUSED
    model = prepared(config, case.mode, "meta" if fake else "cpu")
    plain = model if case.mode.is_full else model.get_base_model()
    if case.mode.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if not case.mode.is_full:
        plain.enable_input_require_grads()
    if case.side and not {TOWER, ALIGNER} & case.mode.trained:  # ms-swift's patch_frozen_module
        plain.model.visual.forward = torch.no_grad()(plain.model.visual.forward)
    modes = (FakeTensorMode(allow_non_fake_inputs=True), WithWholeNumbers()) if fake else ()
    with ExitStack() as stack, as_on_cuda(case.mask):
        for mode in modes:
            stack.enter_context(mode)
        if fake:
            make_fake(model)
        for weight in trained(model):
            weight.grad = torch.zeros_like(weight)
        inputs = _inputs(case, config)
        held = [*model.parameters(), *(weight.grad for weight in trained(model)), *model.buffers()]
        held += [value for name, value in inputs.items() if torch.is_tensor(value) and name != "pixel_values"]
        with LiveBytes(held) as live:
            if "pixel_values" in inputs:
                live.add(inputs["pixel_values"])
            with torch.autocast("cpu", torch.bfloat16, enabled=case.mode.autocast):
                loss = model(**inputs, use_cache=False).loss
            loss.backward()
    return max(live.moments)


def _inputs(case: Case, config: PreTrainedConfig) -> dict[str, Any]:
    pictures, tokens = case.side**2, case.batch.tokens
    ids = torch.zeros(1, tokens, dtype=torch.long)
    trained_here = torch.zeros(tokens, dtype=torch.bool)
    kept = torch.arange(tokens - case.text, tokens)
    if case.side:
        ids[0, :pictures] = config.image_token_id
        trained_here[tokens - case.text :] = True
        kept = trained_here
    inputs = {"input_ids": ids, "labels": torch.zeros(1, case.text, dtype=torch.long), "logits_to_keep": kept}
    if case.side:
        inputs |= {
            "pixel_values": torch.randn(4 * pictures, 3 * 2 * 16 * 16),
            "image_grid_thw": torch.tensor([[1, 2 * case.side, 2 * case.side]]),
            "mm_token_type_ids": (ids == config.image_token_id).long(),
        }
    return inputs


def with_products(cases: list[Case], products: set[str]) -> list[Any]:
    """Give cases as parameters; those of these names cross what others have alone, and are slow."""
    return [pytest.param(case, id=case.name, marks=[pytest.mark.slow] * (case.name in products)) for case in cases]


@pytest.mark.parametrize(
    "case",
    with_products(
        LANGUAGE_ALONE,
        {
            *("LoRA", "LoRA, ZeRO, checkpointing", "LoRA in float32", "LoRA, checkpointing, large vocabulary"),
            "full, checkpointing",
        },
    ),
)
def test_a_pass_has_the_bytes_of_real_tensors(case: Case, tmp_path: Path) -> None:
    assert estimated(case, tmp_path) == pytest.approx(measured(case), rel=0.001)


@pytest.mark.slow
def test_a_pass_has_the_bytes_of_all_layers_of_a_large_model(tmp_path: Path) -> None:
    case = Case("Qwen3-8B", changed(LORA, **AGAIN), QWEN3_8B, 1_000, 3_000)
    assert estimated(case, tmp_path) == pytest.approx(measured(case, fake=True), rel=0.001)


@pytest.mark.parametrize(
    "case",
    with_products(
        WITH_PICTURES,
        {"VL, LoRA", "VL, LoRA everywhere", "VL, LoRA everywhere, checkpointing", "VL, full, checkpointing, aligner"},
    ),
)
def test_activations_with_pictures_are_within_a_tenth(case: Case, tmp_path: Path) -> None:
    assert estimated(case, tmp_path) == pytest.approx(measured(case), rel=0.1)


def test_published_config_files_have_the_published_sizes(tmp_path: Path) -> None:
    file = Path(__file__).parents[1] / "published" / "Qwen3-VL-32B-Instruct" / "config.json"
    config = Qwen3VLConfig.from_dict(json.loads(file.read_text()))
    assert weights_of(read_shape(file.parent)) == sum(
        weight.numel() for weight in model_of(config, torch.bfloat16).parameters()
    )
