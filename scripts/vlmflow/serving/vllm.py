"""Makes vLLM's command line; vLLM is not in the locked environment, and this project has not run it.

Names and limits are those of vLLM 0.11 to 0.27 (docs.vllm.ai; vllm/config/lora.py, vllm/lora/peft_helper.py).
"""

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

from vlmflow.config.model_types import ModelType, kinds_of
from vlmflow.config.row_settings import RowLimits
from vlmflow.config.tuners import ADAPTER_WEIGHTS
from vlmflow.core.errors import VlmflowError
from vlmflow.merging.adapter_config import read_adapter_config
from vlmflow.pictures.budget import ScaleLimits
from vlmflow.serving.server import LOOPBACK

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that --max-lora-rank takes."""

NO_DOMAIN = "none.invalid"
"""A name that no host has (RFC 2606): vLLM fetches pictures from any host unless its list of domains has an entry."""

MERGE = "serve the merged weights: make serve without ADAPTER"


def vllm_words(
    model: Path,
    name: str,
    gpus: int,
    max_length: int,
    sees: bool,
    limits: ScaleLimits | None,
    port: int,
    adapter: Path | None = None,
) -> list[str]:
    """Return the command that serves a model on GPUs with vLLM, on the loopback address, with pictures as data only.

    Its key is in VLLM_API_KEY: as an argument (--api-key) every user of the machine would see it.

    model: the folder of the model, or of the adapter's base. name: what requests ask for. gpus: how many share the
    model. max_length: tokens of prompt and answer together. sees: whether it takes pictures. limits: of pictures; None
    if no rule of the model has such. adapter: the folder of an adapter; requests for `name` then get base + adapter,
    those for `base` the base alone.

    Raises VlmflowError if vLLM would refuse the adapter, or serve only a part of it.
    """
    words = ["vllm", "serve", str(model), "--host", LOOPBACK, "--port", str(port)]
    words += ["--tensor-parallel-size", str(gpus), "--max-model-len", str(max_length)]
    words += ["--served-model-name", "base" if adapter else name]
    words += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]  # else it refuses requests with tools
    # Older versions let each web page ask, and /invocations needs no key.
    words += ["--allowed-origins", "[]"]
    if sees:
        # Without "video": 0 it reserves memory for a whole video at its start.
        words += ["--limit-mm-per-prompt", json.dumps({"image": RowLimits().max_pictures, "video": 0})]
        words += ["--allowed-media-domains", NO_DOMAIN]
    if limits:
        words += ["--mm-processor-kwargs", json.dumps(limits.by_key())]
    if adapter:
        rank = str(_rank_of(adapter, model))
        words += ["--enable-lora", "--lora-modules", f"{name}={adapter}", "--max-lora-rank", rank]
    return words


def _rank_of(folder: Path, model: Path) -> int:
    """Return vLLM's smallest limit that an adapter's ranks are within, after a check that vLLM serves all of it.

    folder: the adapter's. model: its base's.
    """
    config = read_adapter_config(folder)
    if config.use_dora:
        raise VlmflowError(f"{folder}: vLLM does not serve DoRA (use_dora)", MERGE)
    if config.modules_to_save:
        saved = ", ".join(config.modules_to_save)
        raise VlmflowError(f"{folder}: vLLM does not serve layers that an adapter replaces ({saved})", MERGE)
    if config.bias != "none":
        raise VlmflowError(f"{folder}: vLLM does not serve an adapter's biases (bias: {config.bias})", MERGE)
    file = folder / ADAPTER_WEIGHTS
    try:
        with safe_open(file, framework="numpy") as tensors:
            names = sorted(tensors.keys())
    except (OSError, SafetensorError) as error:
        raise VlmflowError(f"{file}: {error}", "train the run again, or restore the file") from None
    if of_tower := [name for name in names if _sees(name, kinds_of(model))]:
        raise VlmflowError(
            f"{file}: changes {len(of_tower)} tensors of the vision tower, such as {of_tower[0]}; vLLM leaves these "
            "out with only a warning, so it would answer as another model",
            MERGE,
        )
    rank = max([config.r, *config.rank_pattern.values()])
    if rank > RANKS[-1]:
        raise VlmflowError(f"{folder}: rank {rank} is above vLLM's largest, {RANKS[-1]}", MERGE)
    return next(limit for limit in RANKS if limit >= rank)


def _sees(tensor: str, kinds: list[ModelType]) -> bool:
    """Return whether an adapter's tensor belongs to a part before the language model."""
    name = tensor.removeprefix("base_model.model.")  # peft's
    return any(kind.part_of(name) != "language_model" for kind in kinds)
