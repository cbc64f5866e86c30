"""DeepSpeed's own settings (`runs.NAME.deepspeed`): which of them a run may set, and what follows from them.

The names are those of DeepSpeed 0.19 (deepspeed/runtime/config.py, zero/config.py, zero/offload_config.py,
precision_config.py). Only those in BLOCKS are allowed: others write files outside the run folder, read settings from
elsewhere, change the data, or give checkpoints another form.
"""

import difflib
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, TypeAdapter, ValidationError

from vlmflow.config.settings import allowed
from vlmflow.config.yaml_file import shown

AUTO = (
    *("train_batch_size", "train_micro_batch_size_per_gpu"),
    *("gradient_accumulation_steps", "gradient_clipping", "fp16.enabled", "bf16.enabled"),
)
"""Settings that follow from the run's own. transformers replaces "auto" in them (integrations/deepspeed.py). Without
them DeepSpeed would use its own defaults: no accumulation, no clipping, 32-bit weights."""

LARGEST = 2**63 - 1
"""The largest whole number of PyTorch."""

Whole = Annotated[int, Field(ge=0, le=LARGEST)]
Positive = Annotated[int, Field(ge=1, le=LARGEST)]
Part = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
OWN_CHECK = None
"""Of a block, the stage, a device, and what AUTO has."""

BLOCKS: dict[str, dict[str, Any]] = {
    "": {
        **dict.fromkeys(("zero_optimization", "bf16", "fp16", "train_batch_size", "gradient_clipping"), OWN_CHECK),
        **dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), OWN_CHECK),
        **dict.fromkeys(("prescale_gradients", "wall_clock_breakdown", "memory_breakdown"), StrictBool),
        **dict.fromkeys(("disable_python_gc", "zero_allow_untested_optimizer"), StrictBool),
        "zero_force_ds_cpu_optimizer": StrictBool,
        "steps_per_print": Positive | None,
        "gradient_predivide_factor": Annotated[float, Field(gt=0, le=LARGEST, allow_inf_nan=False)],
        "communication_data_type": Literal["fp16", "bf16", "fp32"] | None,
    },
    "zero_optimization": {
        **dict.fromkeys(("stage", "offload_param", "offload_optimizer"), OWN_CHECK),
        **dict.fromkeys(("contiguous_gradients", "reduce_scatter", "use_multi_rank_bucket_allreduce"), StrictBool),
        **dict.fromkeys(("allgather_partitions", "ignore_unused_parameters", "round_robin_gradients"), StrictBool),
        **dict.fromkeys(("parameter_alignment", "zero_quantized_weights", "zero_quantized_gradients"), StrictBool),
        **dict.fromkeys(("memory_efficient_linear", "override_module_apply", "log_trace_cache_warnings"), StrictBool),
        **dict.fromkeys(("enable_sanity_checks", "stage3_gather_16bit_weights_on_model_save"), StrictBool),
        **dict.fromkeys(("stage3_use_all_reduce_for_fetch_params", "stage3_allgather_sequential"), StrictBool),
        "overlap_comm": StrictBool | None,
        "reduce_bucket_size": Positive,
        **dict.fromkeys(("allgather_bucket_size", "sub_group_size", "zero_hpz_partition_size"), Whole),
        **dict.fromkeys(("stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"), Whole),
        **dict.fromkeys(("stage3_model_persistence_threshold", "stage3_max_live_parameters"), Whole),
        **dict.fromkeys(("stage3_max_reuse_distance", "stage3_module_granularity_threshold"), Whole),
    },
    "zero_optimization.offload_param": {
        "device": OWN_CHECK,
        "pin_memory": StrictBool,
        **dict.fromkeys(("buffer_count", "buffer_size"), Whole),
    },
    "zero_optimization.offload_optimizer": {
        "device": OWN_CHECK,
        **dict.fromkeys(("pin_memory", "fast_init"), StrictBool),
        "buffer_count": Whole,
        **dict.fromkeys(("ratio", "cpuadam_cores_perc"), Part),
    },
    "bf16": {
        "enabled": OWN_CHECK,
        **dict.fromkeys(("immediate_grad_update", "check_grad_overflow"), StrictBool),
    },
    "fp16": {
        "enabled": OWN_CHECK,
        **dict.fromkeys(("auto_cast", "consecutive_hysteresis"), StrictBool),
        "loss_scale": Annotated[float, Field(ge=0, le=LARGEST, allow_inf_nan=False)],
        "initial_scale_power": Annotated[int, Field(ge=0, le=127)],  # of two; a float has no larger
        **dict.fromkeys(("loss_scale_window", "hysteresis", "min_loss_scale"), Positive),
    },
}
"""The allowed keys of each block, by its path, and what each takes, as DeepSpeed's own classes have it."""

MOST_SHOWN = 100
"""Characters of a value that a message shows."""

LEARNING_RATE = (
    "the workflow sets optimizer and learning rate: remove it, and set runs.NAME.train.learning_rate, lr_scheduler, "
    "warmup_ratio and weight_decay"
)
WRITES = "it would write outside the run folder; remove it"
OTHER_DATA = "it would change which rows a step trains on; remove it"
OTHER_CHECKPOINTS = "checkpoints would have a form that cannot be resumed here; remove it"

REASONS = {
    **dict.fromkeys(("optimizer", "scheduler"), LEARNING_RATE),
    **dict.fromkeys(
        ("tensorboard", "csv_monitor", "wandb", "comet", "flops_profiler", "autotuning", "nebula", "datastates"), WRITES
    ),
    **dict.fromkeys(("data_efficiency", "curriculum_learning", "dataloader_drop_last"), OTHER_DATA),
    **dict.fromkeys(("checkpoint", "zero_optimization.elastic_checkpoint"), OTHER_CHECKPOINTS),
    **dict.fromkeys(
        ("aio", "zero_optimization.offload_param.nvme_path", "zero_optimization.offload_optimizer.nvme_path"), WRITES
    ),
    "tensor_parallel": "layers would be split, and no checkpoint would have the whole adapter; remove it",
    "elasticity": "a run has a fixed number of processes; remove it",
    "zero_optimization.cpu_offload": "DeepSpeed calls it offload_optimizer: {device: cpu}",
    "zero_optimization.cpu_offload_param": "DeepSpeed calls it offload_param: {device: cpu}",
}
"""Keys that people use and that are not allowed: the reason, and what to do."""


def check_deepspeed(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings, with numbers for texts in exponent form: JSON's 2e8 is a text in YAML.

    Raises ValueError with the key and the reason for what a run may not set.
    """
    checked: dict[str, Any] = _with_numbers(settings)
    _check_keys(checked, "")
    zero = checked.get("zero_optimization") or {}
    stage = zero.get("stage")
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        fault = "missing" if stage is None else f"{_short(stage)} is not allowed"
        raise ValueError(f"zero_optimization.stage: {fault}; it must be 0, 1, 2 or 3")
    for path in AUTO:
        if _value(checked, path) not in (None, "auto"):
            raise ValueError(
                f'{path}: {_short(_value(checked, path))}; it follows from the run\'s settings: write "auto"'
            )
    gathers = "stage3_gather_16bit_weights_on_model_save"
    if stage == 3 and zero.get(gathers) is not True:
        raise ValueError(f"zero_optimization.{gathers}: must be true, or no checkpoint would have the whole adapter")
    for block, least in (("offload_optimizer", 1), ("offload_param", 3)):
        device = (zero.get(block) or {}).get("device", "none")
        if device not in ("none", "cpu"):
            reason = "it would write outside the run folder" if device == "nvme" else "DeepSpeed has no such device"
            raise ValueError(f"zero_optimization.{block}.device: {_short(device)}: {reason}; use cpu or none")
        if device == "cpu" and stage < least:
            raise ValueError(f"zero_optimization.{block}: needs stage {least} or higher; the stage is {stage}")
    _check_values(checked, "")
    ratio = _value(checked, "zero_optimization.offload_optimizer.ratio")
    if ratio is not None and ratio < 1 and stage < 3:  # DeepSpeed, runtime/zero/config.py, `offload_ratio_check`
        raise ValueError(f"zero_optimization.offload_optimizer.ratio: below 1 it needs stage 3; the stage is {stage}")
    return checked


def stage_of(settings: Mapping[str, Any]) -> int:
    """Return the stage of ZeRO of checked settings."""
    stage: int = settings["zero_optimization"]["stage"]
    return stage


def filled(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return checked settings with what follows from the run (AUTO)."""
    result = dict(settings)
    for path in AUTO:
        block, _, key = path.rpartition(".")
        if block:
            given = {name: value for name, value in (result.get(block) or {}).items() if value is not None}
            result[block] = {key: "auto", **given}
        elif result.get(key) is None:
            result[key] = "auto"
    return result


def sharing_second_copy(settings: Mapping[str, Any]) -> int:
    """Return how many processes share a second copy of the weights (hpZ), by checked settings; 0 without one."""
    shared = settings["zero_optimization"].get("zero_hpz_partition_size")
    return shared if isinstance(shared, int) and shared > 1 and stage_of(settings) == 3 else 0  # it may be "auto"


def offloaded(settings: Mapping[str, Any]) -> frozenset[str]:
    """Return what checked settings move to the machine's memory: "optimizer", "weights"."""
    zero = settings["zero_optimization"]
    blocks = {"optimizer": "offload_optimizer", "weights": "offload_param"}
    return frozenset(name for name, block in blocks.items() if (zero.get(block) or {}).get("device") == "cpu")


def _check_keys(block: Mapping[str, Any], path: str) -> None:
    for key, value in block.items():
        where = f"{path}.{key}" if path else str(key)
        if where in REASONS:
            raise ValueError(f"{where}: {REASONS[where]}")
        if key not in BLOCKS[path]:
            nearest = difflib.get_close_matches(str(key), BLOCKS[path], n=1, cutoff=0.6)
            hint = f"; nearest: {nearest[0]}" if nearest else ""
            raise ValueError(f"{where}: a run may not set this key of DeepSpeed; allowed: {_listed(path)}{hint}")
        if where in BLOCKS and value is not None:
            if not isinstance(value, dict):
                raise ValueError(
                    f"{where}: {_short(value)} is not allowed; it must be a block of keys: {_listed(where)}"
                )
            _check_keys(value, where)


def _check_values(block: Mapping[str, Any], path: str) -> None:
    """Raise ValueError for a value that its key does not take: DeepSpeed would refuse it on the GPU, or crash.

    DeepSpeed leaves out "auto" in blocks, and so uses its own default.
    """
    for key, value in block.items():
        where = f"{path}.{key}" if path else str(key)
        kind = BLOCKS[path][key]
        if where in BLOCKS:
            _check_values(value or {}, where)
        elif kind is not OWN_CHECK and not (path and value == "auto") and not _fits(kind, value):
            hint = ' or "auto"' if path else ""
            raise ValueError(
                f"{where}: {_short(value)} is not allowed; it must be {allowed(TypeAdapter(kind).json_schema())}{hint}"
            )


def _fits(kind: Any, value: Any) -> bool:
    """Return whether a value is of a kind; for pydantic alone, true would also be the number 1."""
    if isinstance(value, bool) and kind not in (StrictBool, StrictBool | None):
        return False
    try:
        TypeAdapter(kind).validate_python(value)
    except (ValidationError, OverflowError):  # a float of hundreds of digits
        return False
    return True


def _short(value: Any) -> str:
    return shown(value, MOST_SHOWN)


def _listed(path: str) -> str:
    return ", ".join(sorted(BLOCKS[path]))


def _value(settings: Mapping[str, Any], path: str) -> Any:
    here: Any = settings
    for key in path.split("."):
        here = (here or {}).get(key)
    return here


def _with_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_numbers(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_with_numbers(inner) for inner in value]
    if isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            return value
        if math.isfinite(number):
            return int(number) if number.is_integer() else number
    return value
