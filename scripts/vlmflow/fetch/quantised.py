"""What a model's config.json says of quantised weights: which are refused, and which become bfloat16."""

from pathlib import Path
from typing import Any

from vlmflow.config.model_types import unquantised
from vlmflow.core.errors import VlmflowError
from vlmflow.fetch.owners_files import PUBLISHED, read_object

KEY, TEXT = "quantization_config", "text_config"
"""The key that describes the quantisation, and the one part of config.json that may have it, too."""

METHOD = "fp8"
"""The one method whose weights can become bfloat16: E4M3, with a scale for each block or matrix (transformers'
FineGrainedFP8Config)."""

BLOCK = (128, 128)
"""Rows and columns of a block where config.json is silent, as in transformers (5.19)."""


def refuse_quantised(file: Path, source: str = "", *, dequantize: bool = False) -> dict[str, Any]:
    """Return the content of a model's config.json.

    source: the model's address, for the name of the unquantised one. dequantize: whether its weights become bfloat16
    (`models.NAME.dequantize`).

    Raises VlmflowError if it is no object, or of a quantised model; with `dequantize`, of one that is not in FP8.
    """
    config = _read(file)
    found = _quantisation(file, config)
    if found is None:
        if dequantize:
            raise VlmflowError(
                f"{file}: the base is not quantised, and models.NAME.dequantize is for bases in FP8",
                "remove the key dequantize of this model",
            )
        return config
    if dequantize and found.get("quant_method") == METHOD:
        _block(file, found)
        return config
    other = unquantised(source.removeprefix("hf://").partition("@")[0])
    plain = f"hf://{other}, the model that was quantised," if other else "the unquantised model"
    method = f"{file}: the base is quantised ({str(found.get('quant_method', 'no method given'))[:100]})"
    use = f"use {plain} as the base of the run (models.NAME.source); tuner qlora quantises it for the training"
    if dequantize:
        raise VlmflowError(f"{method}, and only FP8 ({METHOD}) can become bfloat16", use)
    if found.get("quant_method") == METHOD:
        use = f"set models.NAME.dequantize: true, which makes its weights bfloat16 once; or {use}"
    raise VlmflowError(f"{method}, and the merge cannot add an update to quantised weights", use)


def block_of(file: Path) -> tuple[int, int] | None:
    """Return the rows and columns that share a scale, of a model that is quantised in FP8; None: the whole matrix.

    file: its config.json, which `refuse_quantised` accepted.
    """
    found = _quantisation(file, _read(file))
    assert found is not None, "refuse_quantised takes no other model"
    return _block(file, found)


def without_quantisation(file: Path) -> dict[str, Any]:
    """Return the content of a model's config.json without what it says of quantised weights."""
    config = {key: value for key, value in _read(file).items() if key != KEY}
    if config.get(TEXT):
        config[TEXT] = {key: value for key, value in config[TEXT].items() if key != KEY}
    return config


def _read(file: Path) -> dict[str, Any]:
    config = read_object(file)
    if not isinstance(config.get(TEXT) or {}, dict):
        raise VlmflowError(f"{file}: {TEXT} = {config[TEXT]!r:.100} is not a JSON object", PUBLISHED)
    return config


def _quantisation(file: Path, config: dict[str, Any]) -> dict[str, Any] | None:
    """Return what describes the quantisation; None if the model is not quantised."""
    found = [part[KEY] for part in (config, config.get(TEXT) or {}) if part.get(KEY)]
    if not found:
        return None
    if found[0] != found[-1]:
        raise VlmflowError(f"{file}: {KEY} and {TEXT}.{KEY} differ", PUBLISHED)
    return found[0] if isinstance(found[0], dict) else {"quant_method": found[0]}


def _block(file: Path, quantisation: dict[str, Any]) -> tuple[int, int] | None:
    block = quantisation.get("weight_block_size", BLOCK)
    if block is None:
        return None
    if not isinstance(block, list | tuple) or len(block) != 2 or any(type(n) is not int or n < 1 for n in block):
        raise VlmflowError(f"{file}: {KEY}.weight_block_size = {block!r:.100} is not two numbers above 0", PUBLISHED)
    return block[0], block[1]
