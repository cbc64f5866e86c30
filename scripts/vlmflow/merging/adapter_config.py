"""Reads an adapter's configuration: the scale of each layer's update, or why it cannot be merged.

The rules are those of peft 0.20 (tuners/lora/config.py, layer.py, variants.py), which writes `adapter_config.json`.
"""

import json
import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from vlmflow.config.strategies import ADAPTER_CONFIG
from vlmflow.config.swift_args import HARMLESS_INITS
from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import read_json

SAY_NOTHING_OF_THE_MERGE = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "ensure_weight_tying",
        "eva_config",
        "inference_mode",
        "loftq_config",
        "lora_dropout",
        "lora_ga_config",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
    }
)
"""Keys about training and loading. Any other unknown key with a value is refused: it may mean arithmetic that this
merge does not support."""

REFUSED = {
    "alora_invocation_tokens": "an activated LoRA applies to some tokens only, which no merged weights can express",
    "arrow_config": "an Arrow router chooses per token, which no merged weights can express",
    "layer_replication": "the adapter repeats layers of the base, which changes the layout",
    "lora_bias": "the adapter trains its own bias inside the update",
    "trainable_token_indices": "the adapter trains single rows of the embedding",
}

TRAIN_OTHERWISE = "train without it, or merge with peft's merge_and_unload and use the result as a base"

UNSAFE = re.compile(r"\)[*+?{]|\{|\(\?")
MOST_REPEATS = 4
"""What a pattern of layers may not have: with them, a match may take longer than anybody waits."""

Rank = Annotated[int, Field(ge=1, le=1 << 20)]
Alpha = Annotated[float, Field(allow_inf_nan=False)]
TaskType = Literal["SEQ_CLS", "SEQ_2_SEQ_LM", "CAUSAL_LM", "TOKEN_CLS", "QUESTION_ANS", "FEATURE_EXTRACTION"]


def _names(value: Any) -> Any:
    return _refuse_unless(value, str, "a text or a list of texts")


def _numbers(value: Any) -> Any:
    return _refuse_unless(value, int, "a whole number or a list of them")


def _refuse_unless(value: Any, kind: type, wanted: str) -> Any:
    listed = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(one, kind) and not isinstance(one, bool) for one in listed):
        raise ValueError(f"it must be {wanted}")
    return value


LayerNames = Annotated[Any, AfterValidator(_names)]
LayerNumbers = Annotated[Any, AfterValidator(_numbers)]


class AdapterConfig(BaseModel):
    """The part of `adapter_config.json` that a merge depends on, or that peft itself would refuse.

    Kinds are strict: peft's arithmetic fails with a text in place of a number, which the merge's does not see.
    """

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    peft_type: str
    r: Rank
    lora_alpha: Alpha
    use_rslora: bool = False
    use_dora: bool = False
    fan_in_fan_out: bool = False
    bias: Literal["none", "all", "lora_only"] = "none"
    rank_pattern: dict[str, Rank] = {}
    alpha_pattern: dict[str, Alpha] = {}
    modules_to_save: list[str] | None = None
    init_lora_weights: bool | str = True
    target_modules: LayerNames = None
    exclude_modules: LayerNames = None
    target_parameters: list[str] | None = None
    layers_to_transform: LayerNumbers = None
    layers_pattern: LayerNames = None
    task_type: TaskType | None = None
    monteclora_config: None = None
    velora_config: None = None

    def rank(self, module: str) -> int:
        """Return the rank of a layer's factors, by the layer's name in the base model; of experts, the parameter's."""
        rank: int = _matching(self.rank_pattern, module, self.r)
        return rank

    def scale(self, module: str) -> float:
        """Return the factor of a layer's update: alpha / r, or alpha / √r with rsLoRA (arXiv:2312.03732)."""
        rank = self.rank(module)
        alpha: float = _matching(self.alpha_pattern, module, self.lora_alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def saves(self, module: str) -> bool:
        """Return whether modules_to_save names a layer or one above it; as in peft, the end of the name must match."""
        parts = module.split(".")
        above = [".".join(parts[: count + 1]) for count in range(len(parts))]
        return any(name.endswith(saved) for name in above for saved in self.modules_to_save or ())


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Read an adapter's configuration, and refuse what this merge does not support.

    Raises VlmflowError with file, key and value.
    """
    path = folder / ADAPTER_CONFIG
    raw = read_json(path)
    if isinstance(raw, dict) and raw.get("peft_type") != "LORA":
        raise _refusal(path, "peft_type", raw.get("peft_type"), "the merge supports only adapters of type LORA")
    try:
        config = AdapterConfig.model_validate(raw)
        for pattern in [*config.rank_pattern, *config.alpha_pattern]:
            if UNSAFE.search(pattern) or len(re.findall(r"[*+?]", pattern)) > MOST_REPEATS:
                raise _refusal(path, "rank_pattern or alpha_pattern", pattern, "a match of it may take forever")
            re.compile(pattern)
    except pydantic.ValidationError as error:
        fault = error.errors()[0]
        key = ".".join(map(str, fault["loc"]))
        raise _refusal(path, key, fault["input"], fault["msg"]) from None
    except (re.error, RecursionError) as error:
        raise _refusal(path, "rank_pattern or alpha_pattern", pattern[:100], str(error)) from None
    for key, value in (config.model_extra or {}).items():
        if value and key not in SAY_NOTHING_OF_THE_MERGE:
            raise _refusal(path, key, value, REFUSED.get(key, "the merge does not support this part of LoRA"))
    if config.init_lora_weights not in HARMLESS_INITS:
        raise _refusal(
            path,
            "init_lora_weights",
            config.init_lora_weights,
            "this initialisation changes the base's weights, so the adapter does not fit the base on disk",
        )
    for key in ("layers_to_transform", "layers_pattern"):
        if isinstance(config.target_modules, str) and (value := getattr(config, key)) is not None:
            raise _refusal(path, key, value, "peft needs a list of target_modules for it, not a text")
    if config.layers_pattern and not config.layers_to_transform:
        raise _refusal(path, "layers_pattern", config.layers_pattern, "peft needs layers_to_transform for it")
    if config.use_dora and config.fan_in_fan_out:
        raise _refusal(path, "use_dora", True, "DoRA on layers that store their weights transposed (fan_in_fan_out)")
    return config


def _matching(patterns: dict[str, Any], module: str, default: Any) -> Any:
    """Return the value of the first pattern that matches the end of the layer's name (peft: get_pattern_key)."""
    found = (value for pattern, value in patterns.items() if re.match(rf"(.*\.)?({pattern})$", module))
    return next(found, default)


def _refusal(path: Path, key: str, value: Any, why: str) -> VlmflowError:
    return VlmflowError(f"{path}: {key} = {json.dumps(value, default=str)}: {why}", TRAIN_OTHERWISE)
