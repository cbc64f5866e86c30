"""DeepSpeed settings of one's own: what a run may set, and what follows from it."""

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from vlmflow.config.deepspeed_json import AUTO, BLOCKS, OWN_CHECK, check_deepspeed, filled
from vlmflow.config.run_settings import RunSettings
from vlmflow.config.strategies import ALL_BUT_WEIGHTS, STAGES, Choices, strategy_of

GATHERS = {"stage3_gather_16bit_weights_on_model_save": True}


def zero(stage: int, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **(GATHERS if stage == 3 else {}), **more}}


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def presets() -> list[Path]:
    swift = find_spec("swift")
    assert swift is not None
    assert swift.origin is not None
    return sorted((Path(swift.origin).parent / "config").glob("zero*.json"))


@pytest.mark.parametrize("file", presets(), ids=lambda file: file.stem)
def test_the_presets_of_ms_swift_may_be_pasted(file: Path) -> None:
    """As they are: JSON is YAML, in which 2e8 is a text."""
    settings = json.loads(file.read_text())
    pasted = yaml.safe_load(file.read_text().replace("\t", " "))
    assert check_deepspeed(pasted) == settings
    assert filled(settings) == settings, "they have all of AUTO"
    run = RunSettings(model="m", dataset="d", strategy="deepspeed", deepspeed=pasted)
    strategy = strategy_of(run.strategy, run.deepspeed)
    assert strategy.states == STAGES[settings["zero_optimization"]["stage"]].states
    if file.stem in ("zero2_offload", "zero3_offload"):
        like = strategy_of(file.stem)
        assert (strategy.offloads, strategy.shards, strategy.needs_compiler) == (like.offloads, like.shards, True)


def test_what_follows_from_the_run_is_filled_in() -> None:
    """Without "auto", DeepSpeed would not accumulate or clip."""
    assert filled(zero(2) | {"bf16": {"check_grad_overflow": False}}) == {
        **zero(2),
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto", "check_grad_overflow": False},
        "fp16": {"enabled": "auto"},
    }


def test_the_arguments_have_the_settings_as_text() -> None:
    one, other = (strategy_of("deepspeed", check_deepspeed(settings)) for settings in (zero(3), zero(3, **GATHERS)))
    arguments = one.arguments_for(Choices("bfloat16", gradient_checkpointing=True))
    assert arguments == other.arguments_for(Choices("bfloat16", gradient_checkpointing=True))
    assert arguments["lora_dtype"] == "bfloat16"
    assert json.loads(str(arguments["deepspeed"])) == filled(zero(3)) == one.deepspeed


def test_what_is_offloaded() -> None:
    cpu = {"device": "cpu"}
    optimizer = strategy_of("deepspeed", check_deepspeed(zero(1, offload_optimizer=cpu)))
    assert (optimizer.offloads, optimizer.needs_compiler) == (ALL_BUT_WEIGHTS, True)
    weights = strategy_of(
        "deepspeed", check_deepspeed(zero(3, offload_param=cpu, offload_optimizer={"device": "none"}))
    )
    assert (weights.offloads, weights.needs_compiler) == ({"weights"}, False)
    pytorchs = check_deepspeed(zero(2, offload_optimizer=cpu) | {"zero_force_ds_cpu_optimizer": False})
    assert not strategy_of("deepspeed", pytorchs).needs_compiler


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("zero_optimization.stage", {}),
    ("zero_optimization.stage", {"zero_optimization": None}),
    ("zero_optimization.stage", {"zero_optimization": {}}),
    ("zero_optimization.stage", zero(4)),
    ("zero_optimization.stage", {"zero_optimization": {"stage": True}}),
    ("zero_optimization", {"zero_optimization": True}),
    ("zero_optimization.stage3_gather_16bit_weights_on_model_save", {"zero_optimization": {"stage": 3}}),
    ("zero_optimization.offload_param.device", zero(3, offload_param={"device": "nvme"})),
    ("zero_optimization.offload_optimizer.nvme_path", zero(3, offload_optimizer={"device": "cpu", "nvme_path": "d"})),
    ("zero_optimization.offload_param", zero(2, offload_param={"device": "cpu"})),
    ("zero_optimization.offload_optimizer", zero(0, offload_optimizer={"device": "cpu"})),
    ("zero_optimization.offload_optimizer.ratio", zero(2, offload_optimizer={"device": "cpu", "ratio": 0.5})),
    ("zero_optimization.offload_optimizer.ratio", zero(1, offload_optimizer={"ratio": 2})),
    ("zero_optimization.offload_optimizer.device", zero(2, offload_optimizer={"device": "disk"})),
    ("zero_optimization.sub_group_size", zero(1, sub_group_size=1.5)),
    *(("zero_optimization.overlap_comm", zero(1, overlap_comm=value)) for value in ("yes", 1, nested(400))),
    *(
        ("zero_optimization.reduce_bucket_size", zero(1, reduce_bucket_size=value))
        for value in (["x"], 10**400, "1e300", -5, True, None)
    ),
    *(("fp16.loss_scale", zero(1) | {"fp16": {"loss_scale": value}}) for value in (-1, 10**400, float("nan"))),
    ("fp16.loss_scale_window", zero(1) | {"fp16": {"loss_scale_window": 0}}),
    ("fp16.initial_scale_power", zero(1) | {"fp16": {"initial_scale_power": 10**6}}),
    ("bf16.enabled", zero(2) | {"bf16": {"enabled": False}}),
    *(
        (key, zero(2) | {key: value})
        for key, value in [
            *(("optimizer", {"type": "AdamW"}), ("scheduler", {}), ("train_batch_size", 8), ("gradient_clipping", 0)),
            *(("train_micro_batch_size_per_gpu", 1), ("gradient_accumulation_steps", 1), ("steps_per_print", 0)),
            *(("tensorboard", {"enabled": True}), ("csv_monitor", {}), ("wandb", {}), ("comet", {}), ("aio", {})),
            *(("flops_profiler", {"output_file": "x"}), ("autotuning", {}), ("tensor_parallel", {"autotp_size": 2})),
            *(("checkpoint", {}), ("data_efficiency", {}), ("compression_training", {})),
            *(("gradient_predivide_factor", value) for value in ("1e400", 0, "auto")),
            *(("communication_data_type", value) for value in (["x"], "fp64")),
        ]
    ),
]
"""The key that the message names, and settings that are refused."""


@pytest.mark.parametrize(("key", "settings"), REFUSED, ids=[key for key, _ in REFUSED])
def test_others_are_refused_with_their_key(key: str, settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=rf"(Value error, |\n *){re.escape(key)}: "):
        RunSettings(model="m", dataset="d", strategy="deepspeed", deepspeed=settings)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (zero(4), "4 is not allowed; it must be 0, 1, 2 or 3"),
        (zero(2) | {"train_batch_size": 8}, 'train_batch_size: 8; it follows from the run\'s settings: write "auto"'),
        (
            zero(2, overlap_com=True),
            "zero_optimization.overlap_com: a run may not set this key .*; nearest: overlap_comm",
        ),
        (zero(1, reduce_bucket_size=10**400), f"1{99 * '0'}… is not allowed; it must be a whole number at least 1"),
        (zero(1, offload_optimizer={"ratio": 2}), "2 is not allowed; it must be a number at least 0 at most 1"),
        (zero(1) | {"communication_data_type": "fp64"}, "'fp64' is not allowed; it must be one of fp16, bf16, fp32"),
    ],
)
def test_a_refusal_says_what_is_allowed(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        RunSettings(model="m", dataset="d", strategy="deepspeed", deepspeed=settings)


def test_keys_without_a_kind_have_a_check_of_their_own() -> None:
    unchecked = {
        f"{path}.{key}".strip(".") for path in BLOCKS for key, kind in BLOCKS[path].items() if kind is OWN_CHECK
    }
    devices = {f"zero_optimization.{block}.device" for block in ("offload_param", "offload_optimizer")}
    assert unchecked == {*AUTO, *devices, "zero_optimization.stage", *BLOCKS} - {""}


def test_the_ends_of_ranges_and_auto_in_a_block_are_taken() -> None:
    given = zero(3, stage3_model_persistence_threshold=2**63 - 1, sub_group_size=1e9, reduce_bucket_size="auto")
    given |= {"fp16": {"loss_scale": 0}, "communication_data_type": "bf16", "steps_per_print": None}
    assert check_deepspeed(given) == given


def test_null_is_auto() -> None:
    settings = filled(check_deepspeed(zero(2) | {"bf16": {"enabled": None}, "gradient_clipping": None}))
    assert settings["bf16"]["enabled"] == settings["gradient_clipping"] == "auto"


@pytest.mark.parametrize("key", AUTO)
def test_auto_may_be_written(key: str) -> None:
    block, _, name = key.rpartition(".")
    check_deepspeed(zero(2) | ({block: {name: "auto"}} if block else {name: "auto"}))


def test_settings_and_strategy_belong_together() -> None:
    with pytest.raises(ValidationError, match="deepspeed: missing; strategy deepspeed needs DeepSpeed's settings"):
        RunSettings(model="m", dataset="d", strategy="deepspeed")
    with pytest.raises(ValidationError, match="deepspeed: strategy zero2 does not use it; set strategy: deepspeed, or"):
        RunSettings(model="m", dataset="d", strategy="zero2", deepspeed=zero(2))
