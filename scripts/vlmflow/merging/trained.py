"""What a training released: an adapter as peft saves it, or the model's own weights as transformers saves them.

Only configurations and headers are read, without torch: a server asks for an adapter's configuration, too. The rules
for it are those of peft 0.20 (tuners/lora/config.py). Of the model's own weights, the names of tensors are those of the
base's files, the types are those of the training, and the division into shards is its own (transformers,
modeling_utils.py, `save_pretrained`).
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pydantic
from pydantic import BaseModel, ConfigDict, Field

from vlmflow.config.strategies import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from vlmflow.config.swift_args import HARMLESS_INITS
from vlmflow.core.errors import VlmflowError
from vlmflow.fetch.model_weights import TensorEntry, read_header
from vlmflow.in_trainer.messages import TRAINED, TrainedTensors

SAY_NOTHING_OF_THE_MERGE = {
    *("auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "inference_mode", "lora_dropout"),
    *("corda_config", "eva_config", "loftq_config", "lora_ga_config", "runtime_config"),
    *("megatron_core", "peft_version", "qalora_group_size", "revision"),
}
"""Keys about training and loading. Any other unknown key with a value is refused: it may mean arithmetic that this
merge does not support."""

REFUSED = {
    "alora_invocation_tokens": "an activated LoRA applies to some tokens only, which no merged weights can express",
    "arrow_config": "an Arrow router chooses per token, which no merged weights can express",
    "layer_replication": "the adapter repeats layers of the base, which changes the layout",
    "lora_bias": "the adapter trains its own bias inside the update",
    "trainable_token_indices": "the adapter trains single rows of the embedding",
}

UNSAFE = re.compile(r"\)[*+?{]|\{|\(\?")
MOST_REPEATS = 4
"""What a pattern of layers may not have: with them, a match may take longer than anybody waits."""

TRAIN_OTHERWISE = "train without it, or merge with peft's merge_and_unload and use the result as a base"
SAVE_AGAIN = "save the adapter again with peft's save_pretrained, or train it again"
COPY_AGAIN = "remove the folder and run the same command again: it is copied from its run folder"

Rank = Annotated[int, Field(ge=1, le=1 << 20)]
Alpha = Annotated[float, Field(allow_inf_nan=False)]
TaskType = Literal["SEQ_CLS", "SEQ_2_SEQ_LM", "CAUSAL_LM", "TOKEN_CLS", "QUESTION_ANS", "FEATURE_EXTRACTION"]


class AdapterConfig(BaseModel):
    """The part of `adapter_config.json` that a merge depends on, or that peft itself would refuse.

    Types are strict: peft's arithmetic fails with a text in place of a number, which the merge's does not see.
    """

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    peft_type: Literal["LORA"]
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
    target_modules: str | list[str] | None = None
    exclude_modules: str | list[str] | None = None
    target_parameters: list[str] | None = None
    layers_to_transform: int | list[int] | None = None
    layers_pattern: str | list[str] | None = None
    task_type: TaskType | None = None
    monteclora_config: None = None
    velora_config: None = None


@dataclass(frozen=True)
class Trained:
    """What a training released.

    path: the adapter's file, or the folder of the model's weights; messages name it. tensors: by name, the file of each
    and its place there.
    """

    path: Path
    tensors: dict[str, tuple[Path, TensorEntry]]


@dataclass(frozen=True)
class Adapter(Trained):
    """An adapter, with its configuration."""

    config: AdapterConfig


@dataclass(frozen=True)
class TrainedModel(Trained):
    """A model's own weights. names: of the tensors that were trained; the others were frozen."""

    names: list[str]


def read_trained(released: Path) -> Adapter | TrainedModel:
    """Read what a training released, without the weights.

    released: a folder with the files of an adapter, or with a model's weights (`supervisor.report.released_files`).

    Raises VlmflowError if a file is missing or damaged, or the adapter is of a kind that cannot be merged.
    """
    adapter = released / ADAPTER_WEIGHTS
    is_adapter = adapter.exists() or (released / ADAPTER_CONFIG).exists()
    if is_adapter and not adapter.exists():
        raise VlmflowError(f"{adapter}: is missing", SAVE_AGAIN)
    headers = [read_header(path) for path in ([adapter] if is_adapter else sorted(released.glob("model*.safetensors")))]
    tensors = {name: (header.path, entry) for header in headers for name, entry in header.tensors.items()}
    if not is_adapter:
        try:
            names = msgspec.json.decode((released / TRAINED).read_bytes(), type=TrainedTensors).tensors
        except (OSError, ValueError) as error:
            raise VlmflowError(f"{released / TRAINED}: {error}", COPY_AGAIN) from None
        return TrainedModel(released, tensors, names)
    config = read_adapter_config(released)
    if not tensors:
        raise VlmflowError(f"{adapter}: has no tensors", SAVE_AGAIN)
    return Adapter(adapter, tensors, config)


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Read an adapter's configuration, and refuse what this merge does not support.

    Raises VlmflowError with file, key and value.
    """
    path = folder / ADAPTER_CONFIG

    def refusal(key: str, value: Any, why: str) -> VlmflowError:
        return VlmflowError(f"{path}: {key} = {json.dumps(value, default=str)}: {why}", TRAIN_OTHERWISE)

    try:
        config = AdapterConfig.model_validate_json(path.read_bytes())
        for pattern in [*config.rank_pattern, *config.alpha_pattern]:
            if UNSAFE.search(pattern) or len(re.findall(r"[*+?]", pattern)) > MOST_REPEATS:
                raise refusal("rank_pattern or alpha_pattern", pattern, "a match of it may take forever")
            re.compile(pattern)
    except OSError as error:
        raise VlmflowError(f"{path}: {error.strerror}", SAVE_AGAIN) from None
    except pydantic.ValidationError as error:
        fault = error.errors()[0]
        if not fault["loc"]:
            raise VlmflowError(f"{path}: {fault['msg']}", SAVE_AGAIN) from None
        raise refusal(".".join(map(str, fault["loc"])), fault["input"], fault["msg"]) from None
    except (re.error, RecursionError) as error:
        raise refusal("rank_pattern or alpha_pattern", pattern[:100], str(error)) from None
    for key, value in (config.model_extra or {}).items():
        if value and key not in SAY_NOTHING_OF_THE_MERGE:
            raise refusal(key, value, REFUSED.get(key, "the merge does not support this part of LoRA"))
    if config.init_lora_weights not in HARMLESS_INITS:
        raise refusal(
            "init_lora_weights",
            config.init_lora_weights,
            "this initialisation changes the base's weights, so the adapter does not fit the base on disk",
        )
    for key in ("layers_to_transform", "layers_pattern"):
        if isinstance(config.target_modules, str) and (value := getattr(config, key)) is not None:
            raise refusal(key, value, "peft needs a list of target_modules for it, not a text")
    if config.layers_pattern and not config.layers_to_transform:
        raise refusal("layers_pattern", config.layers_pattern, "peft needs layers_to_transform for it")
    if config.use_dora and config.fan_in_fan_out:
        raise refusal("use_dora", True, "DoRA on layers that store their weights transposed (fan_in_fan_out)")
    return config
