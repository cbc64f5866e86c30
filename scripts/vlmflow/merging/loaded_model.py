"""Loads model folders with plain transformers, without network, and asks the models for logits."""

import gc
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
)

from vlmflow.core.errors import VlmflowError
from vlmflow.fetch.safetensors_header import read_header
from vlmflow.merging.safetensors_file import FLOAT_TYPES
from vlmflow.merging.verify_files import MERGE_AGAIN

ROUNDING_FACTOR = {torch.float32: 64.0, torch.float16: 8.0, torch.bfloat16: 8.0}
"""The factor of one layer on rounding errors: 3 to 4 times the measured one."""

OFFLINE = {"local_files_only": True, "trust_remote_code": False}
"""Options for loading folders: fetch nothing, and run no Python in them."""


def load(folder: Path, device: str, dtype: str, **values: Any) -> PreTrainedModel:
    """Load a model without network, every weight from the folder.

    device: cpu, or cuda; several GPUs share one model. dtype: the type in which it computes. values: further arguments
    of `from_pretrained`; with state_dict, weights by their names in files, the folder gives its configuration alone.

    Raises VlmflowError if the folder does not load, or lacks weights.
    """
    several = device == "cuda" and torch.cuda.device_count() > 1
    try:
        config = AutoConfig.from_pretrained(folder, **OFFLINE)
        config._attn_implementation = None  # transformers' default for this machine, whatever the owner's had
        sees = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        kind = AutoModelForImageTextToText if sees else AutoModelForCausalLM
        if "state_dict" in values:
            kind = kind._model_mapping[type(config)]  # an automatic class would look into the folder
        model, report = kind.from_pretrained(
            None if "state_dict" in values else folder,
            config=config,
            dtype=getattr(torch, dtype),
            device_map="auto" if several else device,
            **OFFLINE,
            **values,
            output_loading_info=True,
        )
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        raise does_not_load(folder, error) from None
    if missing := sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"]])):
        raise does_not_load(folder, f"no fitting weights for {missing[0]}")
    return model.eval()


def logits_of(model: torch.nn.Module, inputs: Mapping[str, torch.Tensor], positions: int) -> torch.Tensor:
    """Return the logits of a row's last positions in float32: positions by vocabulary.

    Pictures take the type in which the model computes.
    """
    kind = model.dtype
    with torch.inference_mode():
        placed = {
            name: value.to(model.device, kind if value.is_floating_point() else None) for name, value in inputs.items()
        }
        return model(**placed, logits_to_keep=positions).logits[0].float().cpu()


def free(device: str) -> None:
    """Give the memory of models that nobody refers to back to the device."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def too_large(folder: Path, device: str) -> VlmflowError:
    """Return the error for a model that does not fit into the device's memory."""
    return VlmflowError(
        f"{folder}: the model and a row do not fit in the memory of {device}",
        "give the run more GPUs, or prove by tensors alone (runs.NAME.verify.logits: false)",
    )


def allowed_deviation(model: PreTrainedModel, stored: torch.dtype, computed: torch.dtype) -> float:
    """Return the share of their spread by which rounding may change logits (`logit_proof`, "Deviation")."""
    layers = model.config.get_text_config().num_hidden_layers
    coarsest = coarsest_of({stored, computed})
    return float(ROUNDING_FACTOR[coarsest] * torch.finfo(coarsest).eps / 2 * math.sqrt(layers))


def has_experts(model: PreTrainedModel) -> bool:
    """Return whether a model sends each token to some of its experts (transformers' common key)."""
    return bool(getattr(model.config.get_text_config(), "num_experts_per_tok", None))


def rounds_finer(stored: torch.dtype, computed: torch.dtype) -> bool:
    """Return whether weights of the type `stored` change when they are loaded for computing in `computed`."""
    return bool(torch.finfo(stored).eps < torch.finfo(computed).eps)


def stored_type(folder: Path) -> torch.dtype:
    """Return the coarsest type in which a folder stores weights."""
    headers = [read_header(path) for path in folder.glob("*.safetensors")]
    stored = {entry.dtype for header in headers for entry in header.tensors.values()}
    return coarsest_of(FLOAT_TYPES[dtype] for dtype in stored.intersection(FLOAT_TYPES))


def coarsest_of(types: Iterable[torch.dtype]) -> torch.dtype:
    """Return the type with the largest step between two numbers."""
    return max(types, key=lambda kind: torch.finfo(kind).eps)


def does_not_load(folder: Path, why: object) -> VlmflowError:
    """Return the error for a folder that transformers cannot load."""
    return VlmflowError(f"{folder}: does not load offline with transformers: {why}", MERGE_AGAIN)
